"""Makes every process whose path begins here one with the pretended GPU, before anything else imports torch."""

from tests import pretended_gpu

pretended_gpu.install()
