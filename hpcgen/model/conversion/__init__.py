"""From a Hugging Face checkpoint to the weight file, and back."""

from hpcgen.model.conversion.convert import ConversionError, convert
from hpcgen.model.conversion.export import export_safetensors

__all__ = ["ConversionError", "convert", "export_safetensors"]
