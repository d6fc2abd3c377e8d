"""Prediction of a run's memory and time from its configuration and the model's config.json: arithmetic, no torch.

config.json ─→ model (parameters by part, work of a token)
key=value   ─→ workload (roles, ranks, lengths)          ─→ memory (bytes by phase), timing (seconds by phase)
devices (a table, or the measured processor)             ─→ plan (what fits, what to change), search (layouts)
"""
