"""Guards that look at each tensor at each call.

PyTorch 2.11 takes a tensor for what it was where nobody has written to the dictionary that holds it: it would run what
was captured before a parameter was frozen or thawed in place. Later versions look, and leave out the shortcut past
whole modules that goes with it, by which the versions are told apart here.
"""

from __future__ import annotations

from checkmate.torch_internals.dynamo import dynamo_config
from checkmate.torch_internals.names import put_in_place


def _install() -> None:
    if dynamo_config.use_recursive_dict_tags_for_guards:
        dynamo_config.use_recursive_dict_tags_for_guards = False
        dynamo_config.skip_tensor_guards_with_matching_dict_tags = False


put_in_place("guards of parameters", _install)
