"""Small pretrained models of several architectures: build them, pretrain them once, load them."""
