// BLAKE3 in vectors of four lanes, which every processor that we run on has.
#define LANES 4
#define LANES_TARGET
#include "blake3_lanes.h"

namespace pilotlight {

void Words::load(const std::uint8_t *start, std::size_t stride, Vector *words) {
    std::uint32_t blocks[LANES][16];
    for (int lane = 0; lane < LANES; lane++) std::memcpy(blocks[lane], start + lane * stride, BLAKE3_BLOCK_BYTES);
    for (int word = 0; word < 16; word++) words[word] = Vector{blocks[0][word], blocks[1][word], blocks[2][word], blocks[3][word]};
}

void blake3_portable(const Blake3Inputs &inputs, std::uint8_t *values) { hash_lanes(inputs, values); }

}  // namespace pilotlight
