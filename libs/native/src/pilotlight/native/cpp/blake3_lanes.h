// BLAKE3's compression in the lanes of one vector. Included once for each instruction set, by a source that defines LANES, LANES_TARGET
// (the attribute that its functions need), and what turns LANES blocks, `stride` apart, into 16 vectors of words: Words::load.
#include <cstring>

#include "blake3.h"

namespace pilotlight {

namespace {

using Vector = std::uint32_t __attribute__((vector_size(4 * LANES)));

#define LANES_INLINE LANES_TARGET __attribute__((always_inline)) inline

struct Words {
    LANES_INLINE static void load(const std::uint8_t *start, std::size_t stride, Vector *words);
};

template <int bits>
LANES_INLINE Vector rotated(const Vector &word) {
    return (word >> bits) | (word << (32 - bits));
}

LANES_INLINE void mix(Vector &a, Vector &b, Vector &c, Vector &d, const Vector &first, const Vector &second) {
    a += b + first;
    d = rotated<16>(d ^ a);
    c += d;
    b = rotated<12>(b ^ c);
    a += b + second;
    d = rotated<8>(d ^ a);
    c += d;
    b = rotated<7>(b ^ c);
}

template <int number>
LANES_INLINE void round(Vector *v, const Vector *words) {
    constexpr auto &at = BLAKE3_SCHEDULE[number];
    mix(v[0], v[4], v[8], v[12], words[at[0]], words[at[1]]);
    mix(v[1], v[5], v[9], v[13], words[at[2]], words[at[3]]);
    mix(v[2], v[6], v[10], v[14], words[at[4]], words[at[5]]);
    mix(v[3], v[7], v[11], v[15], words[at[6]], words[at[7]]);
    mix(v[0], v[5], v[10], v[15], words[at[8]], words[at[9]]);
    mix(v[1], v[6], v[11], v[12], words[at[10]], words[at[11]]);
    mix(v[2], v[7], v[8], v[13], words[at[12]], words[at[13]]);
    mix(v[3], v[4], v[9], v[14], words[at[14]], words[at[15]]);
}

LANES_TARGET void hash_lanes(const Blake3Inputs &inputs, std::uint8_t *values) {
    const Vector zero = {};
    Vector low, high, h[8];
    for (int lane = 0; lane < LANES; lane++) {
        std::uint64_t counter = inputs.counter + (inputs.counts ? lane : 0);
        low[lane] = static_cast<std::uint32_t>(counter);
        high[lane] = static_cast<std::uint32_t>(counter >> 32);
    }
    for (int word = 0; word < 8; word++) h[word] = zero + BLAKE3_IV[word];
    for (std::size_t block = 0; block < inputs.blocks; block++) {
        std::uint32_t flags = inputs.flags;
        if (block == 0) flags |= inputs.first_flag;
        if (block + 1 == inputs.blocks) flags |= inputs.last_flag;
        Vector words[16];
        Words::load(inputs.start + block * BLAKE3_BLOCK_BYTES, inputs.blocks * BLAKE3_BLOCK_BYTES, words);
        Vector v[16] = {h[0],
                        h[1],
                        h[2],
                        h[3],
                        h[4],
                        h[5],
                        h[6],
                        h[7],
                        zero + BLAKE3_IV[0],
                        zero + BLAKE3_IV[1],
                        zero + BLAKE3_IV[2],
                        zero + BLAKE3_IV[3],
                        low,
                        high,
                        zero + static_cast<std::uint32_t>(BLAKE3_BLOCK_BYTES),
                        zero + flags};
        round<0>(v, words);
        round<1>(v, words);
        round<2>(v, words);
        round<3>(v, words);
        round<4>(v, words);
        round<5>(v, words);
        round<6>(v, words);
        for (int word = 0; word < 8; word++) h[word] = v[word] ^ v[word + 8];
    }
    std::uint32_t turned[8][LANES];
    std::memcpy(turned, h, sizeof turned);
    for (int lane = 0; lane < LANES; lane++)
        for (int word = 0; word < 8; word++) std::memcpy(values + 32 * lane + 4 * word, &turned[word][lane], 4);
}

}  // namespace

}  // namespace pilotlight
