"""Models: loading of policy and value models, LoRA, attention over packed rows, and export in
Hugging Face format.
"""
