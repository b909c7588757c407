"""`rloo vllm-serve`: stock vLLM underneath, guarded, watched, and able to take new weights."""
