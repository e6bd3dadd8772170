"""Modified Fashion-MNIST: do paths gather on the classes with easy labels, or on the images that always had more?"""
