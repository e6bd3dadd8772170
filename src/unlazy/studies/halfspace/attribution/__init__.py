"""What moves the tangent kernel: the gates, or the weights on the paths? (Claim C28.)"""
