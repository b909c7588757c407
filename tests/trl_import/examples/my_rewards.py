"""Beside vllm_server.yaml."""


def brevity(completions, **kwargs):
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [1.0 / (1.0 + len(text)) for text in texts]
