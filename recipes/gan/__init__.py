"""A GAN on handwritten digits: manual optimization with two optimizers."""
