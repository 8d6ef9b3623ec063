"""What trains a model of the laboratory."""

from typing import Any

import torch

from foreshock.lab.training.model import GPT
from foreshock.lab.training.recipes import Recipe


def optimizers(model: GPT, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """What trains `model` under `recipe`; on a GPU ready to be captured in a CUDA graph.

    Raises ValueError for a recipe whose biases have both a rate and a decay of their own.
    """
    if recipe.bias_rate != 1.0 and recipe.bias_decay is not None:
        raise ValueError(f"recipe {recipe.name} gives both bias_rate and bias_decay; give one of them")
    rate, on_gpu = recipe.learning_rate, next(model.parameters()).is_cuda
    matrices = [p for p in model.h.parameters() if p.dim() == 2] if recipe.optimizer == "muon" else []
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    split = [[p for p in others if p.dim() > 1], [p for p in others if p.dim() == 1]]
    groups: list[dict[str, Any]] = [{"params": others}]
    if recipe.bias_rate != 1.0:
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        rest = [p for p in others if all(p is not bias for bias in biases)]
        groups = [{"params": rest}, {"params": biases, "rate_share": recipe.bias_rate}]
    if recipe.bias_decay is not None:
        groups = [{"params": split[0]}, {"params": split[1], "weight_decay": recipe.bias_decay}]
    adamw = torch.optim.AdamW(
        groups,
        lr=torch.tensor(rate, device="cuda") if on_gpu else rate,
        betas=recipe.betas,
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
        fused=True,
        capturable=on_gpu,
    )
    made: list[torch.optim.Optimizer] = [adamw]
    if matrices:
        made.append(
            torch.optim.Muon(matrices, lr=rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group["initial_lr"] = rate * group.pop("rate_share", 1.0)
    return made
