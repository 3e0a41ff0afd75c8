"""Models: loading a policy or value model, LoRA, packed and branched attention, export in Hugging
Face format.
"""
