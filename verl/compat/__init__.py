"""What is kept for a promise: names that code written for this family of frameworks imports.

Nothing of ours calls what is in here, and nothing imports this room but by name, on first use
(``verl.utils.lazy``), from where the names are expected:

* ``micro_batches``: ``verl.utils.seqlen_balancing.{rearrange_micro_batches, get_reverse_idx}``,
  kept for workers that cut their own micro-batches.

Two more stay where they are, because they are a few lines of a class: the dispatch modes marked
"kept" in ``verl.single_controller.base.decorator``, and ``DataProto.make_iterator``,
``save_to_disk`` and ``load_from_disk``.
"""
