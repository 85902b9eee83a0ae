"""The broker process: one queue and one slot pool per model, and the supervisor of its workers."""
