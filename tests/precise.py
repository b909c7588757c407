"""Models whose arithmetic is float64 throughout."""

import torch


def in_float64(model):
    """The model with its norms in float64: transformers computes RMSNorm in float32 whatever the model's dtype."""

    def forward(self, hidden):
        scale = 1 + self.weight if "Gemma" in type(self).__name__ else self.weight
        epsilon = getattr(self, "variance_epsilon", None) or self.eps
        return scale * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)
    return model
