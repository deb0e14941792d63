"""What data sets share: images, sequences, published files, manifests of folders. No file here is a data set."""
