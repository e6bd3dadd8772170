"""How a network's learning changes with its width: exponents by layer, what they mean, rates for maximal updates."""
