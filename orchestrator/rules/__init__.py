"""Why a cell cannot run: one list of rules for training, one for the target."""
