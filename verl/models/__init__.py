"""Model code: loading of policy and value models, LoRA, packed and branched attention, and export in
Hugging Face format.
"""
