"""When are features finished? Gates copied during training on the circle, frozen, with fresh experts (claim C27)."""
