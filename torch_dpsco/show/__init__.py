"""What is shown of public numbers: pictures, previews, loggers and the command line. Nothing inside imports it."""

from torch_dpsco.acts import register

register("model.preview", "torch_dpsco.show.preview:preview")
register("schema.check", "torch_dpsco.show.look:look")
register("plan.plot", "torch_dpsco.show.plan:draw")
register("report.plot", "torch_dpsco.show.card:draw")
register("report.save", "torch_dpsco.show.card:save")
