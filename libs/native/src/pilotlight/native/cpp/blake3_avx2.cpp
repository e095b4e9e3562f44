// BLAKE3 in vectors of eight lanes.
#include "blake3.h"

#ifdef __x86_64__
#include <immintrin.h>

#define LANES 8
#define LANES_TARGET __attribute__((target("avx2")))
#include "blake3_lanes.h"

namespace pilotlight {

LANES_INLINE void transpose(const std::uint8_t *start, std::size_t stride, Vector *words) {
    __m256i rows[8], pairs[8], fours[8];
    for (int lane = 0; lane < 8; lane++) rows[lane] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(start + lane * stride));
    for (int at = 0; at < 8; at += 2) {
        pairs[at] = _mm256_unpacklo_epi32(rows[at], rows[at + 1]);
        pairs[at + 1] = _mm256_unpackhi_epi32(rows[at], rows[at + 1]);
    }
    for (int at = 0; at < 8; at += 4)
        for (int half = 0; half < 2; half++) {
            fours[at + 2 * half] = _mm256_unpacklo_epi64(pairs[at + half], pairs[at + 2 + half]);
            fours[at + 2 * half + 1] = _mm256_unpackhi_epi64(pairs[at + half], pairs[at + 2 + half]);
        }
    for (int word = 0; word < 4; word++) {
        words[word] = reinterpret_cast<Vector>(_mm256_permute2x128_si256(fours[word], fours[4 + word], 0x20));
        words[4 + word] = reinterpret_cast<Vector>(_mm256_permute2x128_si256(fours[word], fours[4 + word], 0x31));
    }
}

void Words::load(const std::uint8_t *start, std::size_t stride, Vector *words) {
    transpose(start, stride, words);
    transpose(start + 32, stride, words + 8);
}

LANES_TARGET void blake3_avx2(const Blake3Inputs &inputs, std::uint8_t *values) { hash_lanes(inputs, values); }

}  // namespace pilotlight
#endif
