#pragma once
// Declared by name only; see ../README.md.
namespace gloo {
class Algorithm;
}
