"""Python's twins of lockstep/models, as a user would write them."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Perceptron(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        layers = []
        for before, after in zip(widths, widths[1:]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x):
        return self.layers(x.flatten(1))


class ConvNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, kernel_size=5, stride=1, padding=2), nn.BatchNorm2d(16),
                                    nn.ReLU(), nn.MaxPool2d(kernel_size=2, stride=2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, kernel_size=5, stride=1, padding=2), nn.BatchNorm2d(32),
                                    nn.ReLU(), nn.MaxPool2d(kernel_size=2, stride=2))
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

    def forward(self, x):
        out = self.layer2(self.layer1(x))
        return self.fc(out.reshape(out.size(0), -1))


class FashionCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                                    nn.MaxPool2d(kernel_size=2, stride=2))
        self.layer2 = nn.Sequential(nn.Conv2d(32, 64, kernel_size=3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2))
        self.fc1 = nn.Linear(64 * 6 * 6, 600)
        self.drop = nn.Dropout(0.25)
        self.fc2 = nn.Linear(600, 120)
        self.fc3 = nn.Linear(120, 10)

    def forward(self, x):
        out = self.layer2(self.layer1(x))
        out = self.drop(self.fc1(out.view(out.size(0), -1)))
        return self.fc3(self.fc2(out))


class GptLayerNorm(nn.Module):
    """With an optional bias, as nanoGPT has it."""

    def __init__(self, channels, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class GptAttention(nn.Module):
    def __init__(self, channels, heads, dropout, bias):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(channels, 3 * channels, bias=bias)
        self.c_proj = nn.Linear(channels, channels, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                   for part in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0,
                                           is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class GptMlp(nn.Module):
    def __init__(self, channels, dropout, bias):
        super().__init__()
        self.c_fc = nn.Linear(channels, 4 * channels, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * channels, channels, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class GptBlock(nn.Module):
    def __init__(self, channels, heads, dropout, bias):
        super().__init__()
        self.ln_1 = GptLayerNorm(channels, bias)
        self.attn = GptAttention(channels, heads, dropout, bias)
        self.ln_2 = GptLayerNorm(channels, bias)
        self.mlp = GptMlp(channels, dropout, bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """What nanoGPT's model.py does, with a head that is not tied to the embedding."""

    def __init__(self, vocabulary=65, context=128, layers=6, heads=6, channels=384, dropout=0.0, bias=True):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocabulary, channels), wpe=nn.Embedding(context, channels), drop=nn.Dropout(dropout),
            h=nn.ModuleList([GptBlock(channels, heads, dropout, bias) for _ in range(layers)]),
            ln_f=GptLayerNorm(channels, bias)))
        self.lm_head = nn.Linear(channels, vocabulary, bias=False)
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            torch.nn.init.zeros_(module.bias)

    def forward(self, tokens):
        places = torch.arange(0, tokens.size(1), dtype=torch.long)
        x = self.transformer.drop(self.transformer.wte(tokens) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1, downsample=None):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = downsample

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Module):
    """What torchvision.models.resnet18() makes."""

    def __init__(self, classes=1000):
        super().__init__()
        self.inputs = 64
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self.make_layer(64, 1)
        self.layer2 = self.make_layer(128, 2)
        self.layer3 = self.make_layer(256, 2)
        self.layer4 = self.make_layer(512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 1)
                nn.init.constant_(module.bias, 0)

    def make_layer(self, outputs, stride):
        downsample = None
        if stride != 1 or self.inputs != outputs:
            downsample = nn.Sequential(nn.Conv2d(self.inputs, outputs, 1, stride, bias=False),
                                       nn.BatchNorm2d(outputs))
        layers = [BasicBlock(self.inputs, outputs, stride, downsample), BasicBlock(outputs, outputs)]
        self.inputs = outputs
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


SMALL_GPT = "gpt:layers=2,heads=2,channels=32,context=16,vocabulary=13"

MODELS = {
    "mlp": lambda: Perceptron(784, 128, 64, 10),
    "convnet": ConvNet,
    "linear": lambda: nn.Linear(20, 1),
    "fashion-cnn": FashionCNN,
    "wide": lambda: Perceptron(*[784] * 7, 10),
    "gpt": Gpt,
    SMALL_GPT: lambda: Gpt(13, 16, 2, 2, 32),
    SMALL_GPT + ",dropout=0.2,bias=0": lambda: Gpt(13, 16, 2, 2, 32, 0.2, False),
    "resnet18": ResNet18,
    "resnet18:classes=10": lambda: ResNet18(10),
}


def make(name, seed):
    torch.manual_seed(seed)
    return MODELS[name]()
