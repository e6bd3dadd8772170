"""Tables 1 and 2 of the half-space paper: convolutional and residual networks on CIFAR."""
