# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The stand-in hub: serves small weights like Hugging Face does, and misbehaves on request."""
