"""A causal language model in Hugging Face's Trainer, with losses by position and by domain. Random weights, no download.

python examples/language_model.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import unlazy as ul
from unlazy.scope.adapters.huggingface import ScopeCallback, next_token_probe

WORDS, LENGTH = 40, 12
SIZES = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}


def sentences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two domains: sentences that repeat their first half, and sentences that count upwards; and which is which."""
    half, start = torch.randint(2, WORDS, (count, LENGTH // 2)), torch.randint(2, WORDS, (count, 1))
    repeats = torch.arange(count) % 2 == 0
    counts = 2 + (start + torch.arange(LENGTH)) % (WORDS - 2)
    return torch.where(repeats[:, None], torch.cat([half, half], 1), counts), repeats


def main(steps: int = 100, run: str | None = None) -> ul.Verdict:
    set_seed(0)
    tokens, repeats = sentences(512)
    config = GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)  # yours: GPT2LMHeadModel.from_pretrained("gpt2")
    late = torch.zeros(64, LENGTH, dtype=torch.bool)
    late[:, LENGTH // 2 :] = True
    groups = {"repeats": repeats[:64], "counts": ~repeats[:64], "second half": late}
    probe = next_token_probe({"input_ids": tokens[:64], "labels": tokens[:64]})
    watch = ScopeCallback(probe, run, groups=groups)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=3e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[watch]).train()
    assert watch.scope is not None
    print(watch.scope.report())
    return watch.scope.verdict()


if __name__ == "__main__":
    main()
