// BLAKE3 in vectors of sixteen lanes.
#include "blake3.h"

#ifdef __x86_64__
#include <immintrin.h>

#define LANES 16
#define LANES_TARGET __attribute__((target("avx512f")))
#include "blake3_lanes.h"

namespace pilotlight {

void Words::load(const std::uint8_t *start, std::size_t stride, Vector *words) {
    __m512i rows[16], pairs[16], fours[16], eights[16];
    for (int lane = 0; lane < 16; lane++) rows[lane] = _mm512_loadu_si512(start + lane * stride);
    for (int at = 0; at < 16; at += 2) {
        pairs[at] = _mm512_unpacklo_epi32(rows[at], rows[at + 1]);
        pairs[at + 1] = _mm512_unpackhi_epi32(rows[at], rows[at + 1]);
    }
    // fours[at + word]: in its quarter q, word 4 q + `word` of the rows at to at + 3.
    for (int at = 0; at < 16; at += 4)
        for (int half = 0; half < 2; half++) {
            fours[at + 2 * half] = _mm512_unpacklo_epi64(pairs[at + half], pairs[at + 2 + half]);
            fours[at + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[at + half], pairs[at + 2 + half]);
        }
    for (int word = 0; word < 4; word++) {
        eights[word] = _mm512_shuffle_i32x4(fours[word], fours[4 + word], 0x88);
        eights[4 + word] = _mm512_shuffle_i32x4(fours[word], fours[4 + word], 0xdd);
        eights[8 + word] = _mm512_shuffle_i32x4(fours[8 + word], fours[12 + word], 0x88);
        eights[12 + word] = _mm512_shuffle_i32x4(fours[8 + word], fours[12 + word], 0xdd);
    }
    for (int word = 0; word < 4; word++) {
        words[word] = reinterpret_cast<Vector>(_mm512_shuffle_i32x4(eights[word], eights[8 + word], 0x88));
        words[4 + word] = reinterpret_cast<Vector>(_mm512_shuffle_i32x4(eights[4 + word], eights[12 + word], 0x88));
        words[8 + word] = reinterpret_cast<Vector>(_mm512_shuffle_i32x4(eights[word], eights[8 + word], 0xdd));
        words[12 + word] = reinterpret_cast<Vector>(_mm512_shuffle_i32x4(eights[4 + word], eights[12 + word], 0xdd));
    }
}

LANES_TARGET void blake3_avx512(const Blake3Inputs &inputs, std::uint8_t *values) { hash_lanes(inputs, values); }

}  // namespace pilotlight
#endif
