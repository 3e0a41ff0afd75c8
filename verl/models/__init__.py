"""Models: loading of policy and value models, LoRA, packed and branched attention, export in
Hugging Face format.
"""
