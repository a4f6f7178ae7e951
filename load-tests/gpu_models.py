"""Writes the models that a GPU is measured with: usual shapes, random weights. Needs torch, torchvision and transformers.

    python3 load-tests/gpu_models.py FOLDER [NAME...]
"""
import os
import pathlib
import sys

import torch

TOKENS = 128


class Pooled(torch.nn.Module):
    """A text encoder that answers one vector per text: the mean of its tokens' vectors, or its own pooled output."""

    def __init__(self, encoder, mean):
        super().__init__()
        self.encoder, self.mean = encoder, mean

    def forward(self, input_ids, attention_mask, token_type_ids):
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        if not self.mean:
            return found.pooler_output
        mask = attention_mask.unsqueeze(-1).to(found.last_hidden_state.dtype)
        return (found.last_hidden_state * mask).sum(1) / mask.sum(1)


def encoder(half, mean=False, **shape):
    from transformers import BertConfig, BertModel
    torch.manual_seed(1)
    model = Pooled(BertModel(BertConfig(attn_implementation="eager", **shape)), mean).eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    ids = torch.randint(1000, 20000, (2, TOKENS))
    inputs = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    axes = {name: {0: "batch", 1: "sequence"} for name in names} | {"pooled": {0: "batch"}}
    return (model.half() if half else model), inputs, names, "pooled", axes


def resnet(half):
    import torchvision
    torch.manual_seed(1)
    model = torchvision.models.resnet50(weights=None).eval()
    # Random weights in a network this deep need statistics that fit them, or its outputs mean nothing.
    model.train()
    with torch.no_grad():
        model(torch.rand(8, 3, 224, 224))
    model.eval()
    image = torch.rand(2, 3, 224, 224)
    if half:
        model, image = model.half(), image.half()
    return model, (image,), ["image"], "scores", {"image": {0: "batch"}, "scores": {0: "batch"}}


MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
MODELS = {
    "bert16": lambda: encoder(True),
    "bert32": lambda: encoder(False),
    "resnet32": lambda: resnet(False),
    "resnet16": lambda: resnet(True),
    "minilm": lambda: encoder(False, mean=True, **MINILM),
}


def export(folder, name):
    target = pathlib.Path(folder, name, "1", "model.onnx")
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    model, inputs, names, output, axes = MODELS[name]()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, inputs = model.to(device), tuple(one.to(device) for one in inputs)
    with torch.no_grad():
        torch.onnx.export(model, inputs, str(target), input_names=names, output_names=[output], dynamic_axes=axes,
                          opset_version=17, dynamo=False)
    lines = ["[warmup]", "seconds = 20"]
    if "input_ids" in names:
        lines += ["[warmup.dims]", f"sequence = {TOKENS}"]
    pathlib.Path(folder, name, "model.toml").write_text("\n".join(lines) + "\n")
    print(f"{name}: {os.path.getsize(target) >> 20} MiB", flush=True)


if __name__ == "__main__":
    for wanted in sys.argv[2:] or MODELS:
        export(sys.argv[1], wanted)
