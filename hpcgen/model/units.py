"""Units: the groups of parameters that are resident, streamed and bound together, in the order a forward needs them."""

from transformers import PreTrainedModel

from hpcgen.model.family import Family

EMBEDDING, FINAL_NORM, HEAD = "embedding", "final_norm", "head"


def layer_unit(index: int) -> str:
    return f"layer.{index}"


def units_of(model: PreTrainedModel, family: Family, layers: int) -> dict[str, list[str]]:
    """Unit name to the names of its parameters and persistent buffers, in the order of a forward.

    A head whose weight is the embedding's (tied) has no parameters of its own, so there is no unit 'head'.
    Everything outside embedding, layers and head (little: the final norm) is 'final_norm'.
    """
    units: dict[str, list[str]] = {
        EMBEDDING: [],
        **{layer_unit(i): [] for i in range(layers)},
        FINAL_NORM: [],
        HEAD: [],
    }
    for name in owned_names(model):
        if name.startswith(f"{family.layers}."):
            units[layer_unit(int(name[len(family.layers) + 1 :].split(".", 1)[0]))].append(name)
        elif name.startswith(f"{family.embedding}."):
            units[EMBEDDING].append(name)
        elif name.startswith(f"{family.head}."):
            units[HEAD].append(name)
        else:
            units[FINAL_NORM].append(name)
    return {unit: names for unit, names in units.items() if names}


def owned_names(model: PreTrainedModel) -> list[str]:
    """Names in the state dict, without those that share (tie) the tensor of another."""
    tied = set(aliases_of(model))
    return [name for name in model.state_dict(keep_vars=True) if name not in tied]


def aliases_of(model: PreTrainedModel) -> dict[str, str]:
    """Tied names: the name that has no tensor of its own, to the name whose tensor it uses."""
    return dict(model.all_tied_weights_keys)
