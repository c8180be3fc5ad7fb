from implicit_attn.weights.registry import Pretrained as Pretrained
from implicit_attn.weights.registry import find_pretrained as find_pretrained
from implicit_attn.weights.registry import load_pretrained as load_pretrained
from implicit_attn.weights.registry import pretrained_models as pretrained_models
from implicit_attn.weights.registry import weights_file as weights_file
from implicit_attn.weights.registry import weights_path as weights_path
