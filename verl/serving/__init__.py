"""`verl serve`: one base model behind the Tinker API (tinker 0.38), many adapters in training and sampling over it.

    HTTP (`server`, `service`) ── requests ──▶ `work`: one thread, in their order ──▶ `models`: adapters, samplers
        ◀── futures: results wait under an id until they are fetched ──┘

An adapter has a training engine of its own (gradients, optimizer state) over the base's tensors, which all share and
nobody changes: what one client does never enters another's numbers.
"""
