"""FLOPs, bytes and seconds of layers and models, as plans predict and runs measure them."""
