"""A whole slice, imports included, with the patches that its environment asks for."""

import patches

from hotlap.train import slice as slice_module

patches.as_told()
slice_module.main()
