"""What several models share: layers in order, dropout, pretrained weights. No file here is a model."""
