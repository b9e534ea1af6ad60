"""What is shown of public numbers: pictures, previews, loggers and the command line. Nothing inside imports it."""

from torch_dpsco.acts import register

register("model.preview", "torch_dpsco.show.preview:preview")
register("schema.check", "torch_dpsco.show.look:look")
