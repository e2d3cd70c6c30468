"""A reward model behind `--custom-rm-path`: made once, in a worker process, and asked in batches."""

from __future__ import annotations


class CustomRewardModel:
    """Any model of Hugging Face's with a head of one score.

    Args:
        model_path: `--custom-rm-model-path`.
    """

    def __init__(self, model_path):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.model = AutoModelForSequenceClassification.from_pretrained(model_path).eval()

    def compute_reward(self, prompts, responses):
        """A score for each response: a logit, squashed to 0 to 1 so that none outweighs all others."""
        import torch

        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=1024)
        with torch.inference_mode():
            return self.model(**batch).logits[:, 0].sigmoid().tolist()
