"""Models of the LM evaluation harness (lm_eval) that run on this engine."""
