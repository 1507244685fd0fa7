/* Attention of one query per row and query head to tokens in few bits. `library.py` compiles this file; the tensors are
 * those of the Triton kernels (`launching.launch`).
 *
 * Slots are read in parts, which run in parallel and do not depend on the number of threads. A part is read tile by
 * tile: a tile is decoded to float32 once for all query heads that share a KV head, and stays in the first cache. */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* `WIDTH`: bytes of a vector register; compilers split wider vectors badly. */
#if defined(__AVX512F__)
enum { WIDTH = 64 };
#elif defined(__AVX__)
enum { WIDTH = 32 };
#else
enum { WIDTH = 16 };
#endif
enum { TILE = 64, PART = 512, LANES = WIDTH / sizeof(float), PIECES = 4 };
typedef float Lanes __attribute__((vector_size(WIDTH), aligned(4), may_alias));
/* Logits of hidden tokens are below the first; they are set to the second. */
static const float HIDDEN = -1e30f, LOWEST = -3e38f;

typedef struct {
    const float *query, *keys, *values, *means, *sizes, *key_turn, *value_turn;
    const float *frequencies, *signs, *scalings, *sinks, *bias;
    const uint8_t *shown, *key_codes, *value_codes;
    const uint16_t *key_levels, *value_levels; /* bfloat16 */
    const int32_t *positions;
    const int64_t *places, *starts, *lengths, *records; /* `records`: bytes before what lies at each slot; or none */
    float *scratch, *output;
    int64_t sets, heads, group, together, place_count, key_dim, value_dim, key_bits, value_bits;
    int64_t key_stored, value_stored, slots, set_slots, mask_row, mask_head, mask_slot;
    int64_t pairs, pair_step, pair_offset, still;
    double scaling, softcap; /* no bound: 0 */
} Call;

static int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static int64_t parts_of(const Call *call) { return (call->slots + PART - 1) / PART; }

/* A query head's vector for products with `features`, and what it has in common with all tokens. */
static int64_t vector_size(const Call *call) { return call->key_dim + 2 * call->pairs + 1; }

/* A part's largest logit, its sum of exponentials, and its sum of values, still mixed, for a query head. */
static int64_t sums_size(const Call *call) { return call->value_dim + 2; }

/* Floats of `scratch` for vectors, and for the sums behind them. */
static int64_t vectors_and_sums(const Call *call) {
    return call->sets * call->group * (vector_size(call) + parts_of(call) * sums_size(call));
}

/* Floats that `scratch` has to hold; at its end there is room for `join`, too much for a stack in large blocks. */
int64_t scratch_size(const Call *call) {
    return vectors_and_sums(call) + call->place_count + 1 + call->value_dim;
}

static float *vectors_of(const Call *call, int64_t set) {
    return call->scratch + set * call->group * vector_size(call);
}

static float *sums_of(const Call *call, int64_t set, int64_t part) {
    return vectors_of(call, call->sets) + (set * parts_of(call) + part) * call->group * sums_size(call);
}

/* ---- numbers ---- */

static inline float from_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* In float32; what lies at slots of no token may be no finite number. */
static inline float level_of(uint16_t stored) {
    float level = from_bits((uint32_t)stored << 16);
    return fabsf(level) < 3e38f ? level : 0.0f;
}

/* Codes, or the level, of the token at a slot of all sets. */
static inline const uint8_t *codes_at(const Call *call, const uint8_t *codes, int64_t stored, int64_t slot) {
    return codes + (call->records ? call->records[slot] : slot * stored);
}

static inline float level_at(const Call *call, const uint16_t *levels, int64_t slot) {
    return level_of(call->records ? *(const uint16_t *)((const uint8_t *)levels + call->records[slot]) : levels[slot]);
}

static inline float dot(const float *one, const float *other, int64_t count) {
    float sum = 0.0f;
    for (int64_t at = 0; at < count; at++) sum += one[at] * other[at];
    return sum;
}

static inline void add_scaled(float *sum, float factor, const float *numbers, int64_t count) {
    for (int64_t at = 0; at < count; at++) sum[at] += factor * numbers[at];
}

/* Four vectors at a time, so that the sum is read and written less often. */
static inline void add_four(float *restrict sum, const float *factors, const float *numbers, int64_t count) {
    const float *one = numbers, *two = one + count, *three = two + count, *four = three + count;
    for (int64_t at = 0; at < count; at++)
        sum[at] += factors[0] * one[at] + factors[1] * two[at] + factors[2] * three[at] + factors[3] * four[at];
}

/* Of each column `[width, TILE]` the sum by these factors, and by one more of a 1; sums stay in registers. */
static inline void column_sums(float *sums, const float *factors, const float *columns, int64_t width) {
    const Lanes start = factors[width] - (Lanes){0};
    for (int64_t first = 0; first < TILE; first += PIECES * LANES) {
        Lanes one = start, two = start, three = start, four = start;
        for (int64_t row = 0; row < width; row++) {
            const Lanes *lanes = (const Lanes *)(columns + row * TILE + first);
            one += factors[row] * lanes[0];
            two += factors[row] * lanes[1];
            three += factors[row] * lanes[2];
            four += factors[row] * lanes[3];
        }
        Lanes *targets = (Lanes *)(sums + first);
        targets[0] = one, targets[1] = two, targets[2] = three, targets[3] = four;
    }
}

/* Of numbers up to 0, by a Taylor series around the nearest multiple of log 2. */
static inline float exponential(float number) {
    float in_range = number < -87.0f ? -87.0f : number;
    float steps = rintf(in_range * 1.44269504f);
    float rest = (float)((double)in_range - (double)steps * 0.6931471805599453);
    float series = 1.0f + rest * (1.0f + rest * (1.0f / 2 + rest * (1.0f / 6 + rest * (1.0f / 24
        + rest * (1.0f / 120 + rest * (1.0f / 720 + rest * (1.0f / 5040)))))));
    return number < -87.0f ? 0.0f : series * from_bits((uint32_t)((int32_t)steps + 127) << 23);
}

/* Negative in the third and fourth quarter of a turn. */
static inline float with_sign(float number, int32_t quarter) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return from_bits(bits ^ (uint32_t)(quarter & 2) << 30);
}

/* The cosine and the sine of an angle, by Taylor series around the nearest quarter of a turn. */
static inline void wave(float angle, float *cosine, float *sine) {
    float quarters = rintf(angle * 0.636619772f);
    int32_t quarter = (int32_t)quarters;
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) /* exact products: as precise as doubles, in half the time */
    float rest = __builtin_fmaf(quarters, 4.37113883e-8f, __builtin_fmaf(quarters, -1.57079637f, angle));
#else
    float rest = (float)((double)angle - (double)quarters * 1.5707963267948966);
#endif
    float square = rest * rest;
    float odd = rest * (1.0f + square * (-1.0f / 6 + square * (1.0f / 120
        + square * (-1.0f / 5040 + square * (1.0f / 362880)))));
    float even = 1.0f + square * (-1.0f / 2 + square * (1.0f / 24
        + square * (-1.0f / 720 + square * (1.0f / 40320 + square * (-1.0f / 3628800)))));
    float turned_even = quarter & 1 ? odd : even, turned_odd = quarter & 1 ? even : odd;
    *cosine = with_sign(turned_even, quarter + 1);
    *sine = with_sign(turned_odd, quarter);
}

/* ---- codes, see `codec.planes_of` ---- */

/* Three bits are two and one. */
static inline int64_t plane_bits(int64_t bits, int64_t lower) { return bits == 3 ? (lower ? 1 : 2) : bits; }

/* The numbers `[dim, TILE]` of a tile's tokens, without mean, sizes and mixing; a token is a column. */
static inline void decode_columns(const Call *call, float *numbers, int64_t first, int64_t count,
                                  const float *levels, int64_t bits, int64_t dim) {
    int64_t stored = call->key_stored;
    uint32_t words[(stored / 4 + 1) * TILE]; /* four bytes each, of which the first is the lowest */
    memset(words, 0, sizeof words);
    for (int64_t at = 0; at < count; at++) {
        const uint8_t *token = codes_at(call, call->key_codes, stored, first + at);
        for (int64_t word = 0; word < stored / 4; word++) memcpy(words + word * TILE + at, token + 4 * word, 4);
        memcpy(words + stored / 4 * TILE + at, token + stored / 4 * 4, stored % 4);
    }
    int64_t before = 0;
    for (int64_t lower = 0, plane; lower < bits; lower += plane) {
        plane = plane_bits(bits, lower);
        int64_t width = (dim * plane + 7) / 8;
        float less = lower ? 0.0f : (float)((1 << bits) - 1) / 2, factor = (float)(1 << lower);
        for (int64_t channel = 0, part = 0; channel < dim; part++)
            for (int64_t byte = before; byte < before + width && channel < dim; byte++, channel++) {
                const uint32_t *source = words + byte / 4 * TILE, mask = (1u << plane) - 1;
                int shift = (int)(byte % 4 * 8 + part * plane);
                float *target = numbers + channel * TILE;
                for (int64_t at = 0; at < TILE; at++) {
                    float number = ((float)(int32_t)(source[at] >> shift & mask) * factor - less) * levels[at];
                    target[at] = lower ? target[at] + number : number;
                }
            }
        before += width;
    }
}

/* The numbers `[dim]` of one token. */
static inline void decode_row(float *numbers, const uint8_t *codes, float level, int64_t bits, int64_t dim) {
    for (int64_t lower = 0, plane; lower < bits; lower += plane) {
        plane = plane_bits(bits, lower);
        int64_t width = (dim * plane + 7) / 8;
        float factor = level * (float)(1 << lower), less = lower ? 0.0f : level * (float)((1 << bits) - 1) / 2;
        for (int64_t part = 0; part < 8 / plane; part++) {
            float *target = numbers + part * width;
            int64_t count = least(width, dim - part * width);
            int shift = (int)(part * plane), mask = (1 << plane) - 1;
            for (int64_t at = 0; at < count; at++) {
                float number = (float)(codes[at] >> shift & mask) * factor - less;
                target[at] = lower ? target[at] + number : number;
            }
        }
        codes += width;
    }
}

static inline float logit_of(const Call *call, float product) {
    float logit = product * (float)call->scaling, bound = (float)call->softcap;
    return bound > 0 ? tanhf(logit / bound) * bound : logit;
}

/* A logit with what the mask says of this query head and slot. */
static inline float masked(const Call *call, float logit, int64_t row, int64_t head, int64_t slot) {
    int64_t at = row * call->mask_row + head * call->mask_head + slot * call->mask_slot;
    if (call->shown) return call->shown[at] ? logit : LOWEST;
    if (!call->bias) return logit;
    return call->bias[at] < HIDDEN ? LOWEST : logit + call->bias[at];
}

/* ---- steps ---- */

/* A query's vector. Its product with the mean key is the same for all tokens but for the turn, so it is a product with
 * cosines and sines. */
static void prepare(const Call *call, int64_t set, int64_t member) {
    int64_t dim = call->key_dim, statistics = set * (dim + call->value_dim);
    const float *query = call->query + (set * call->group + member) * dim;
    const float *mean = call->means + statistics, *size = call->sizes + statistics;
    float *vector = vectors_of(call, set) + member * vector_size(call);
    float *even = vector + dim, *odd = even + call->pairs;
    memset(vector, 0, dim * sizeof(float));
    for (int64_t at = 0; at < dim; at++) add_scaled(vector, query[at] * size[at], call->key_turn + at * dim, dim);
    for (int64_t pair = 0; pair < call->pairs; pair++) {
        int64_t one = pair * call->pair_step, other = one + call->pair_offset;
        even[pair] = (query[one] * mean[one] + query[other] * mean[other]) * call->scalings[one];
        odd[pair] = (query[one] * mean[other] - query[other] * mean[one]) * call->scalings[one] * call->signs[one];
    }
    odd[call->pairs] = dot(query + call->still, mean + call->still, dim - call->still);
}

/* The logits `[group, TILE]` of a tile; `features` `[key_dim + 2 * pairs, TILE]` end with cosines and sines. */
static void tile_logits(const Call *call, int64_t set, int64_t first, int64_t start, int64_t count, float *features,
                        float *logits) {
    int64_t row = set / call->heads, width = vector_size(call) - 1;
    float levels[TILE] = {0};
    for (int64_t at = 0; at < count; at++) levels[at] = level_at(call, call->key_levels, first + at);
    switch (call->key_bits) { /* constants make better code */
    case 8: decode_columns(call, features, first, count, levels, 8, call->key_dim); break;
    case 4: decode_columns(call, features, first, count, levels, 4, call->key_dim); break;
    default: decode_columns(call, features, first, count, levels, call->key_bits, call->key_dim);
    }
    for (int64_t member = 0; member < call->group; member++) {
        const float *vector = vectors_of(call, set) + member * (width + 1);
        float *own = logits + member * TILE;
        int64_t head = set % call->heads * call->group + member;
        column_sums(own, vector, features, width);
        for (int64_t at = 0; at < TILE; at++) own[at] = at < count ? logit_of(call, own[at]) : LOWEST;
        if (call->shown || call->bias)
            for (int64_t at = 0; at < count; at++) own[at] = masked(call, own[at], row, head, start + at);
    }
    for (int64_t place = 0; place < call->place_count; place++) { /* read in `join` */
        int64_t at = call->places[set * call->place_count + place] - start;
        if (at >= 0 && at < count)
            for (int64_t member = 0; member < call->group; member++) logits[member * TILE + at] = LOWEST;
    }
}

/* Logits of `count` tokens become weights; returns the factor on all sums before them. */
static inline float weigh(float *logits, float *most, float *total, int64_t count) {
    float largest = *most, sum = 0.0f;
    for (int64_t at = 0; at < count; at++) largest = logits[at] > largest ? logits[at] : largest;
    float factor = *most > LOWEST ? exponential(*most - largest) : 0.0f;
    for (int64_t at = 0; at < count; at++) {
        float weight = exponential(logits[at] - largest);
        logits[at] = logits[at] > HIDDEN ? weight : 0.0f;
        sum += logits[at];
    }
    *total = *total * factor + sum;
    *most = largest;
    return factor;
}

/* Weigh a tile's values, decoded. Where `bits` and `dim` are constants, the loops are unrolled. */
static inline void add_values(const Call *call, int64_t first, int64_t count, float *logits, float *sums, int64_t bits,
                              int64_t dim) {
    int64_t stored = call->value_stored;
    float numbers[TILE * dim];
    memset(numbers + count * dim, 0, (TILE - count) * dim * sizeof(float));
    for (int64_t at = 0; at < count; at++)
        decode_row(numbers + at * dim, codes_at(call, call->value_codes, stored, first + at),
                   level_at(call, call->value_levels, first + at), bits, dim);
    for (int64_t member = 0; member < call->group; member++) {
        float *own = sums + member * sums_size(call), *weights = logits + member * TILE;
        float factor = weigh(weights, own, own + 1, TILE);
        for (int64_t at = 0; at < dim; at++) own[2 + at] *= factor;
        for (int64_t at = 0; at < TILE; at += 4) add_four(own + 2, weights + at, numbers + at * dim, dim);
    }
}

static void add_tile(const Call *call, int64_t first, int64_t count, float *logits, float *sums) {
    int64_t bits = call->value_bits, dim = call->value_dim;
    if (bits == 4 && dim == 64) add_values(call, first, count, logits, sums, 4, 64);
    else if (bits == 4 && dim == 128) add_values(call, first, count, logits, sums, 4, 128);
    else if (bits == 8 && dim == 64) add_values(call, first, count, logits, sums, 8, 64);
    else if (bits == 8 && dim == 128) add_values(call, first, count, logits, sums, 8, 128);
    else add_values(call, first, count, logits, sums, bits, dim);
}

/* A part of the slots, for all KV heads that hold the same positions. */
static void read_part(const Call *call, int64_t first_set, int64_t part) {
    int64_t width = vector_size(call) - 1, dim = call->key_dim;
    float features[width * TILE], logits[call->group * TILE], places[TILE] = {0};
    float *cosines = features + dim * TILE, *sines = cosines + call->pairs * TILE;
    int64_t start = part * PART, end = least(start + PART, call->lengths ? call->lengths[first_set] : call->slots);
    const int32_t *positions = call->positions;
    if (positions) positions += call->starts ? call->starts[first_set] : first_set / call->together * call->set_slots;
    for (int64_t set = first_set; set < first_set + call->together; set++)
        for (int64_t member = 0; member < call->group; member++) {
            float *sums = sums_of(call, set, part) + member * sums_size(call);
            memset(sums, 0, sums_size(call) * sizeof(float));
            sums[0] = LOWEST;
        }
    for (int64_t tile = start; tile < end; tile += TILE) {
        int64_t count = least(TILE, end - tile);
        for (int64_t at = 0; positions && at < count; at++) places[at] = (float)positions[tile + at];
        for (int64_t pair = 0; pair < call->pairs; pair++) {
            float frequency = call->frequencies[pair * call->pair_step];
            for (int64_t at = 0; at < TILE; at++)
                wave(places[at] * frequency, cosines + pair * TILE + at, sines + pair * TILE + at);
        }
        for (int64_t set = first_set; set < first_set + call->together; set++) {
            int64_t first = call->starts ? call->starts[set] : set * call->set_slots;
            tile_logits(call, set, first + tile, tile, count, features, logits);
            add_tile(call, first + tile, count, logits, sums_of(call, set, part));
        }
    }
}

/* Parts, tokens that are not rounded, and sinks become one output. */
static void join(const Call *call, int64_t set, int64_t member) {
    int64_t dim = call->value_dim, parts = parts_of(call), count = call->place_count;
    int64_t row = set / call->heads, head = set % call->heads * call->group + member;
    const int64_t *places = call->places + set * count;
    const float *query = call->query + (set * call->group + member) * call->key_dim;
    float *weights = call->scratch + vectors_and_sums(call), *mixed = weights + count + 1;
    float most = LOWEST, total = 0.0f;
    float *output = call->output + (set * call->group + member) * dim;
    for (int64_t at = 0; at < count; at++) {
        const float *key = call->keys + (set * count + at) * call->key_dim;
        weights[at] = places[at] < 0 ? LOWEST
            : masked(call, logit_of(call, dot(query, key, call->key_dim)), row, head, places[at]);
    }
    weights[count] = call->sinks ? call->sinks[head] : LOWEST;
    for (int64_t part = 0; part < parts; part++) {
        float there = sums_of(call, set, part)[member * sums_size(call)];
        most = there > most ? there : most;
    }
    weigh(weights, &most, &total, count + 1);
    memset(mixed, 0, dim * sizeof(float));
    memset(output, 0, dim * sizeof(float));
    for (int64_t part = 0; part < parts; part++) {
        const float *sums = sums_of(call, set, part) + member * sums_size(call);
        float factor = sums[0] > HIDDEN ? exponential(sums[0] - most) : 0.0f;
        total += factor * sums[1];
        add_scaled(mixed, factor, sums + 2, dim);
    }
    for (int64_t at = 0; at < dim; at++) output[at] = dot(call->value_turn + at * dim, mixed, dim);
    for (int64_t at = 0; at < count; at++)
        if (places[at] >= 0) add_scaled(output, weights[at], call->values + (set * count + at) * dim, dim);
    for (int64_t at = 0; total > 0 && at < dim; at++) output[at] /= total;
}

void attend(const Call *call) {
    int64_t queries = call->sets * call->group, parts = parts_of(call), items = call->sets / call->together * parts;
    for (int64_t query = 0; query < queries; query++) prepare(call, query / call->group, query % call->group);
#pragma omp parallel for if (items > 1)
    for (int64_t item = 0; item < items; item++) read_part(call, item / parts * call->together, item % parts);
    for (int64_t query = 0; query < queries; query++) join(call, query / call->group, query % call->group);
}

/* ---- tokens as they came ---- */

/* Attention of one query per row and query head to segments of keys and values in float32 or bfloat16 (`narrow`). */
typedef struct {
    const float *query;
    const void *keys, *values;
    const int64_t *starts, *lengths;
    float *output;
    int64_t sets, group, key_dim, value_dim, narrow;
    double scaling;
} Plain;

static inline void widen(float *target, const uint16_t *source, int64_t count) {
    for (int64_t at = 0; at < count; at++) target[at] = from_bits((uint32_t)source[at] << 16);
}

static inline void read_plain(const Plain *call, int64_t set, int64_t key_dim, int64_t dim) {
    int64_t group = call->group, start = call->starts[set], length = call->lengths[set];
    float logits[group * TILE], sums[group * 2], rows[call->narrow ? TILE * (key_dim > dim ? key_dim : dim) : 1];
    const float *query = call->query + set * group * key_dim;
    float *output = call->output + set * group * dim, scaling = (float)call->scaling;
    memset(output, 0, group * dim * sizeof(float));
    for (int64_t member = 0; member < group; member++) sums[2 * member] = LOWEST, sums[2 * member + 1] = 0.0f;
    for (int64_t tile = 0; tile < length; tile += TILE) {
        int64_t count = least(TILE, length - tile), first = start + tile;
        const float *keys = (const float *)call->keys + first * key_dim;
        const float *values = (const float *)call->values + first * dim;
        if (call->narrow) widen(rows, (const uint16_t *)call->keys + first * key_dim, count * key_dim), keys = rows;
        for (int64_t at = 0; at < count; at++)
            for (int64_t member = 0; member < group; member++)
                logits[member * TILE + at] = scaling * dot(query + member * key_dim, keys + at * key_dim, key_dim);
        if (call->narrow) widen(rows, (const uint16_t *)call->values + first * dim, count * dim), values = rows;
        for (int64_t member = 0; member < group; member++) {
            float *weights = logits + member * TILE, *sum = output + member * dim;
            float factor = weigh(weights, sums + 2 * member, sums + 2 * member + 1, count);
            for (int64_t at = 0; at < dim; at++) sum[at] *= factor;
            int64_t at = 0;
            for (; at + 4 <= count; at += 4) add_four(sum, weights + at, values + at * dim, dim);
            for (; at < count; at++) add_scaled(sum, weights[at], values + at * dim, dim);
        }
    }
    for (int64_t member = 0; member < group; member++)
        for (int64_t at = 0; at < dim; at++) output[member * dim + at] /= sums[2 * member + 1];
}

void attend_plain(const Plain *call) {
#pragma omp parallel for if (call->sets > 1)
    for (int64_t set = 0; set < call->sets; set++) {
        if (call->key_dim == 64 && call->value_dim == 64) read_plain(call, set, 64, 64);
        else if (call->key_dim == 128 && call->value_dim == 128) read_plain(call, set, 128, 128);
        else read_plain(call, set, call->key_dim, call->value_dim);
    }
}

/* ---- decoding ---- */

/* The first `held` tokens of all sets in few bits, with mixed channels, decoded to `output` `[sets, room, dim]`; zeros
 * where a set has none. `sizes` and `means` `[sets, dim]`: none if nothing was subtracted; `positions`: none if the mean
 * does not turn. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *levels;
    const float *turn, *sizes, *means, *frequencies, *signs, *scalings;
    const int32_t *positions;
    const int64_t *starts, *lengths;
    float *output;
    int64_t sets, heads, together, dim, bits, stored, held, room, set_slots, statistics;
    int64_t pairs, pair_step, pair_offset, still;
} Decode;

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Order __attribute__((vector_size(32)));

/* GCC has the name that clang knows from version 12 on. */
#if defined(__clang__)
#define REORDERED(lanes, ...) __builtin_shufflevector(lanes, lanes, __VA_ARGS__)
#else
#define REORDERED(lanes, ...) __builtin_shuffle(lanes, (Order){__VA_ARGS__})
#endif

/* `turn` times numbers, for a power of two of channels: signs, and a Hadamard matrix. */
static inline void mix_back(float *restrict target, float *restrict numbers, const float *turn, const float *signs,
                            int64_t dim) {
    if (dim & (dim - 1)) {
        for (int64_t at = 0; at < dim; at++) target[at] = dot(turn + at * dim, numbers, dim);
        return;
    }
    int64_t half = 1;
    if (dim >= 8) { /* sums and differences of neighbours within eight lanes */
        const Eight one = {1, -1, 1, -1, 1, -1, 1, -1}, two = {1, 1, -1, -1, 1, 1, -1, -1};
        const Eight four = {1, 1, 1, 1, -1, -1, -1, -1};
        for (int64_t at = 0; at < dim; at += 8) {
            Eight *lanes = (Eight *)(numbers + at), all = *lanes;
            all = REORDERED(all, 1, 0, 3, 2, 5, 4, 7, 6) + all * one;
            all = REORDERED(all, 2, 3, 0, 1, 6, 7, 4, 5) + all * two;
            *lanes = REORDERED(all, 4, 5, 6, 7, 0, 1, 2, 3) + all * four;
        }
        for (half = 8; half < dim; half *= 2)
            for (int64_t block = 0; block < dim; block += 2 * half)
                for (int64_t at = block; at < block + half; at += 8) {
                    Eight *first = (Eight *)(numbers + at), *last = (Eight *)(numbers + at + half);
                    Eight sum = *first + *last, difference = *first - *last;
                    *first = sum, *last = difference;
                }
    }
    for (; half < dim; half *= 2)
        for (int64_t block = 0; block < dim; block += 2 * half)
            for (int64_t at = block; at < block + half; at++) {
                float sum = numbers[at] + numbers[at + half], difference = numbers[at] - numbers[at + half];
                numbers[at] = sum, numbers[at + half] = difference;
            }
    for (int64_t at = 0; at < dim; at++) target[at] = numbers[at] * signs[at];
}

static inline void decode_set(const Decode *call, int64_t set, int64_t bits, int64_t dim) {
    int64_t length = call->lengths ? least(call->lengths[set], call->held) : call->held;
    int64_t start = call->starts ? call->starts[set] : set * call->set_slots;
    const int32_t *positions = call->positions;
    if (positions) positions += call->starts ? start : set / call->together * call->set_slots;
    const float *sizes = call->sizes ? call->sizes + set * call->statistics : 0;
    const float *mean = call->means ? call->means + set * call->statistics : 0;
    float numbers[dim], signs[dim], cosines[TILE * (call->pairs + 1)], sines[TILE * (call->pairs + 1)];
    float *output = call->output + set * call->room * dim;
    for (int64_t at = 0; at < dim; at++) signs[at] = call->turn[at * dim]; /* of the constant channel, scaled */
    for (int64_t tile = 0; tile < length; tile += TILE) {
        int64_t count = least(TILE, length - tile);
        for (int64_t at = 0; positions && at < count; at++)
            for (int64_t pair = 0; pair < call->pairs; pair++)
                wave((float)positions[tile + at] * call->frequencies[pair * call->pair_step],
                     cosines + at * call->pairs + pair, sines + at * call->pairs + pair);
        for (int64_t at = 0; at < count; at++) {
            int64_t slot = start + tile + at;
            float *own = output + (tile + at) * dim;
            decode_row(numbers, call->codes + slot * call->stored, level_of(call->levels[slot]), bits, dim);
            mix_back(own, numbers, call->turn, signs, dim);
            if (!mean) continue;
            for (int64_t channel = 0; channel < dim; channel++) own[channel] *= sizes[channel];
            if (!positions) {
                for (int64_t channel = 0; channel < dim; channel++) own[channel] += mean[channel];
                continue;
            }
            const float *cosine = cosines + at * call->pairs, *sine = sines + at * call->pairs;
            for (int64_t pair = 0; pair < call->pairs; pair++) {
                int64_t one = pair * call->pair_step, other = one + call->pair_offset;
                own[one] += call->scalings[one] * (mean[one] * cosine[pair] - mean[other] * sine[pair]);
                own[other] += call->scalings[one] * (mean[other] * cosine[pair] + mean[one] * sine[pair]);
            }
            for (int64_t channel = call->still; channel < dim; channel++) own[channel] += mean[channel];
        }
    }
    memset(output + length * dim, 0, (call->held - length) * dim * sizeof(float));
}

void decode(const Decode *call) {
#pragma omp parallel for if (call->sets > 1)
    for (int64_t set = 0; set < call->sets; set++) {
        if (call->bits == 4 && call->dim == 64) decode_set(call, set, 4, 64);
        else if (call->bits == 4 && call->dim == 128) decode_set(call, set, 4, 128);
        else decode_set(call, set, call->bits, call->dim);
    }
}
