// The uniform numbers of numpy's Philox, so that a token's randomness is the same on every backend.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define OASIS_BOTH __host__ __device__
#else
#define OASIS_BOTH
#endif

namespace oasis {

// numpy.random.Generator(numpy.random.Philox(key=key, counter=counter)).random(): the first word of
// Philox4x64-10's block after `counter` (numpy counts up before it draws), its upper 53 bits in
// [0, 1). Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
OASIS_BOTH inline double philox_uniform(uint64_t key, uint64_t counter) {
  using Wide = unsigned __int128;
  uint64_t c[4] = {counter + 1, counter + 1 == 0, 0, 0}, k[2] = {key, 0};
  for (int round = 0; round < 10; ++round) {
    const Wide a = static_cast<Wide>(0xD2E7470EE14C6C93u) * c[0];
    const Wide b = static_cast<Wide>(0xCA5A826395121157u) * c[2];
    const uint64_t next[4] = {
        static_cast<uint64_t>(b >> 64) ^ c[1] ^ k[0], static_cast<uint64_t>(b),
        static_cast<uint64_t>(a >> 64) ^ c[3] ^ k[1], static_cast<uint64_t>(a)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    k[0] += 0x9E3779B97F4A7C15u;
    k[1] += 0xBB67AE8584CAA73Bu;
  }
  return static_cast<double>(c[0] >> 11) * 0x1p-53;
}

}  // namespace oasis

#undef OASIS_BOTH
