/* The arithmetic of `torch_dpsco.native` on plain memory: no Python, no torch, no state, no memory of its own.

   Rows are float32, those of tables also float64, `stride` numbers apart; sums and norms are float64. Each row is read by
   code that sees no other row, so that a score, a slope, a norm, a weight, an image are functions of the record alone.
   Bounds: docs/proofs/rounding.md and docs/proofs/noise.md. Compiled without fast-math; products may be fused with sums,
   as the proofs allow. */

#ifndef BODY

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif
#if defined(__clang__)
#define ONE __attribute__((noinline))
#else
#define ONE __attribute__((noinline, noclone)) /* a function that is compiled once */
#endif
#define LARGEST 0x1p64 /* norms from here on are infinite, as where squares overflow float32 */
#define NORM_ERROR 0x1p-18
#define PIECE 1024    /* squares that are added in float32 */
#define HIDDEN 0x1p-63 /* of each coordinate, whose square may be read as 0 */
#define FACTOR_ERROR 0x1p-40
#define GROUP 4        /* rows that are read together */
#define CACHED 4096    /* numbers of a block of groups, that stay in cache */
#define MOST 8         /* groups of a block */
#define LANES 8        /* blocks of the keystream that are made together */
#define SOME 512       /* pairs of Gaussians, whose logarithms stay there */
#define HIGH 6         /* numbers of a backprop, and of an input, whose products are summed in registers */
#define BROAD 16
#define PANELS 4 /* of BROAD inputs, that stay in cache */
#define BATCH 32       /* images of rows, that stay there */
#define COLUMNS 5      /* of records */
#define FEW ((uint64_t)1 << 40) /* words whose V is not known well enough */
#define TINY 1e-100    /* norms whose squares neither underflow */
#define VAST 1e100     /* nor overflow */

typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef float f16 __attribute__((vector_size(64)));
typedef double d4 __attribute__((vector_size(32)));
typedef int64_t i4 __attribute__((vector_size(32)));
typedef uint64_t u4 __attribute__((vector_size(32)));
typedef uint32_t v4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));

enum { GIVEN, SIGN, LOGISTIC, SQUARE };
enum { CURVED, BENT, FIXED }; /* losses of records */

typedef struct {
    const float *rows;
    const int64_t *index; /* of the rows, or NULL for all in order */
    int64_t stride, n, d;
} rows_t;

typedef struct {
    const void *rows;      /* float64 where wide, else float32 */
    const double *numbers; /* most before, most after, constant, whole, moved, then d centers and d factors */
    int64_t wide, stride, d, width;
    const double *norms; /* of the images, as measured; NULL while they are */
} table_t;

static inline const float *row_at(const rows_t *x, int64_t i) {
    return x->rows + (x->index ? x->index[i] : i) * x->stride;
}

/* What a row keeps of its length, when it is cut to `most`; 0 for one that is not finite, or longer by 2^1021. */
static double share_of(double norm, const double *p, int64_t d, double most) {
    if (norm > TINY && norm < VAST) return norm > most ? most / norm : 1.0;
    double largest = 0.0, sum = 0.0;
    int exponent;
    for (int64_t j = 0; j < d; j++) {
        if (!(fabs(p[j]) < INFINITY)) return 0.0;
        if (fabs(p[j]) > largest) largest = fabs(p[j]);
    }
    frexp(largest, &exponent);
    double scale = ldexp(1.0, exponent > 1000 ? 1000 : exponent < -1000 ? -1000 : exponent);
    for (int64_t j = 0; j < d; j++) sum += p[j] / scale * (p[j] / scale);
    if (!(sqrt(sum) * scale > most)) return 1.0;
    double share = most / sqrt(sum) / scale;
    return share < 0x1p-1021 ? 0.0 : share;
}

/* Adds up rows of sums, neighbors first, into the first one. */
static void fold(double *sums, int64_t count, int64_t width) {
    for (int64_t step = 1; step < count; step *= 2)
        for (int64_t i = 0; i + step < count; i += 2 * step)
            for (int64_t j = 0; j < width; j++) sums[i * width + j] += sums[(i + step) * width + j];
}

#define BODY
#define NAME(name) name##_plain
#define TARGET
#define WIDE(v) __builtin_convertvector(v, d4)
#define NARROW(v) __builtin_convertvector(v, f4)
#define TURNS(v) (__builtin_convertvector(v, u4) << 32)
#define ROOT(v) ((d4){sqrt((v)[0]), sqrt((v)[1]), sqrt((v)[2]), sqrt((v)[3])})
#define JOIN(a, b) ((f8){(a)[0], (a)[1], (a)[2], (a)[3], (b)[0], (b)[1], (b)[2], (b)[3]})
#define ROOT8(v)                                                                                                         \
    ((f8){sqrtf((v)[0]), sqrtf((v)[1]), sqrtf((v)[2]), sqrtf((v)[3]), sqrtf((v)[4]), sqrtf((v)[5]), sqrtf((v)[6]),       \
          sqrtf((v)[7])})
#include "_kernel.c"
#undef NAME
#undef TARGET
#undef WIDE
#undef NARROW
#undef TURNS
#undef ROOT
#undef ROOT8
#undef JOIN

#if defined(__x86_64__)
#include <immintrin.h>
#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDE(v) ((d4)_mm256_cvtps_pd((__m128)(v))) /* compilers make four instructions of the above */
#define NARROW(v) ((f4)_mm256_cvtpd_ps((__m256d)(v)))
#define TURNS(v) ((u4)_mm256_cvtepu32_epi64((__m128i)(v)) << 32)
#define ROOT(v) ((d4)_mm256_sqrt_pd((__m256d)(v)))
#define ROOT8(v) ((f8)_mm256_sqrt_ps((__m256)(v)))
#define JOIN(a, b) ((f8)_mm256_set_m128((__m128)(b), (__m128)(a)))
#define LONGER __builtin_cpu_supports("avx512f")
#include "_kernel.c"
#define CALL(name, ...) (has_avx2() ? name##_avx2(__VA_ARGS__) : name##_plain(__VA_ARGS__))
#define KIND has_avx2()
static int has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
#define CALL(name, ...) name##_plain(__VA_ARGS__)
#define KIND 0
#endif

/* By which `native` knows that it was compiled from this text. */
API int64_t dpsco_version(void) { return DPSCO_VERSION; }

/* Which of the two codes runs here. */
API int64_t dpsco_kind(void) { return KIND; }

/* out[i] = upper bound of the norm of row i; infinite from LARGEST on. */
API void dpsco_norms(const float *rows, int64_t stride, int64_t n, int64_t d, double *out) {
    rows_t x = {rows, 0, stride, n, d};
    CALL(norms, &x, out);
}

/* out[j] += sum_i weights[i] rows[i][j]; rows of weight 0 are not read. */
API void dpsco_sum(const float *rows, int64_t stride, int64_t n, int64_t d, const double *weights, double *out) {
    rows_t x = {rows, 0, stride, n, d};
    CALL(weighted, &x, weights, out);
}

/* out[0..d] = sum_i w_i (x_i, 1): w_i the slope of row i, clipped to limit / factors[i] and times scale.

   The slope is that of a loss (kind) at the score x_i . weight + bias, or targets[i] itself (GIVEN). Targets and
   factors, bounds of |(x, 1)|, are taken at the place of the row; factors that are not given are computed. Returns how
   many of the n places are not in [0, records); if there are any, nothing is read. */
API int64_t dpsco_linear(const float *rows, int64_t stride, int64_t records, const int64_t *index, int64_t n, int64_t d,
                         const float *weight, float bias, int64_t kind, const float *targets, const double *factors,
                         double limit, double scale, double *out) {
    rows_t x = {rows, index, stride, n, d};
    int64_t outside = 0;
    memset(out, 0, 8 * (d + 1));
    for (int64_t i = 0; index && i < n; i++) outside += index[i] < 0 || index[i] >= records;
    if (!outside) CALL(linear, &x, weight, bias, kind, targets, factors, limit, scale, out);
    return outside;
}

/* out[i] = the slope of row i, as above. */
API void dpsco_slopes(const float *rows, int64_t stride, int64_t n, int64_t d, const float *weight, float bias,
                      int64_t kind, const float *targets, float *out) {
    rows_t x = {rows, 0, stride, n, d};
    CALL(derivatives, &x, weight, bias, kind, targets, out);
}

/* places[0..k) = the positions in (last, size) of a Poisson sample, and one from `size` on if the words are enough: each
   word is a gap, floor(log V / log_miss). Returns k, or -1 where a word that is needed does not decide its gap: V below
   2^40 2^-63, or a quotient within `room` of an integer. */
API int64_t dpsco_gaps(const char *words, int64_t n, double log_miss, double room, int64_t size, int64_t last,
                       int64_t *places) {
    return CALL(gaps, words, n, log_miss, room, size, last, places);
}

/* Shares of rows, before (n) and after (n), and norms of their images; 0 and infinite for one that is not finite. Scratch
   has room for GROUP images. */
API void dpsco_measure(const void *rows, int64_t wide, int64_t stride, int64_t d, const double *numbers, int64_t width,
                       int64_t n, double *scratch, double *shares, double *norms) {
    table_t x = {rows, numbers, wide, stride, d, width, 0};
    CALL(measure, &x, n, scratch, shares, norms);
}

/* out = images of n rows from `start` on, `width` numbers each; shares as measured, of `records` rows. */
API void dpsco_images(const void *rows, int64_t wide, int64_t stride, int64_t d, const double *numbers,
                      int64_t width, const double *norms, int64_t start, int64_t n, int64_t records,
                      const double *shares, double *out) {
    table_t x = {rows, numbers, wide, stride, d, width, norms};
    for (int64_t r = 0; r < n; r += GROUP)
        CALL(image, &x, start + r, n - r < GROUP ? n - r : GROUP, shares + start + r, shares + records + start + r, 1,
             out + r * width, width);
}

/* out = sum of weights[i] image_i image_i' over n rows from `start` on: (padded, padded), padded a multiple of 8. Scratch
   has room for 2 BATCH such rows, and is 0, as is out. */
API void dpsco_gram(const void *rows, int64_t wide, int64_t stride, int64_t d, const double *numbers,
                    int64_t width, const double *norms, int64_t start, int64_t n, int64_t records,
                    const double *shares, const double *weights, int64_t padded, double *scratch, double *out) {
    table_t x = {rows, numbers, wide, stride, d, width, norms};
    for (int64_t i = start; i < start + n; i += BATCH)
        CALL(gram, &x, i, start + n - i < BATCH ? start + n - i : BATCH, shares + i, shares + records + i, weights,
             padded, scratch, out);
    for (int64_t i = 0; i < width; i++)
        for (int64_t j = 0; j < i; j++) out[i * padded + j] = out[j * padded + i];
}

/* values[i] = log V of words[i]; returns how many of them are outside of (low, high). */
API int64_t dpsco_logs(const char *words, int64_t n, double low, double high, double *values) {
    return CALL(logs, words, n, low, high, values);
}

/* out[0..n) = mean + scale times Gaussians of the bits: for (n + 1)/2 pairs a word of 64 bits each, then an angle each,
   of 64 bits (wide: numbers are float64) or 32 (float32). The cosines come first. Words are used by their logarithms,
   which may be given; returns how many of those that are not are outside of (low, high). The mean may be missing; without
   it and logarithms, float32 numbers are computed in float32. */
API int64_t dpsco_gaussians(const char *bits, int64_t n, int64_t wide, double scale, double low, double high,
                            const double *given, const double *mean, void *out) {
    int64_t half = (n + 1) / 2, outside = 0;
    const char *angles = bits + 8 * half;
    for (int64_t i = 0; i < half; i += SOME) {
        int64_t first = half - i < SOME ? half - i : SOME, second = n - half - i < first ? n - half - i : first;
        double some[SOME];
        const double *plus = mean ? mean + i : 0, *also = mean ? mean + half + i : 0;
        if (!wide && !given && !mean) {
            outside += CALL(single, bits + 8 * i, angles + 4 * i, first, second, scale, low, high, (float *)out + i,
                            (float *)out + half + i);
            continue;
        }
        if (given)
            memcpy(some, given + i, 8 * first);
        else
            outside += CALL(logs, bits + 8 * i, first, low, high, some);
        if (wide)
            CALL(polar64, some, angles + 8 * i, first, second, scale, plus, also, (double *)out + i,
                 (double *)out + half + i);
        else
            CALL(polar32, some, angles + 4 * i, first, second, scale, plus, also, (float *)out + i,
                 (float *)out + half + i);
    }
    return outside;
}

/* Blocks place, place + 1, .. of ChaCha20 (RFC 8439, section 2.3) under a key of 32 bytes. The counter has the lower 32
   bits of the place; the nonce has the label, 64 bits, then the kind, 0 or 1, plus twice the upper bits of the place. */
API void dpsco_chacha(const char *key, int64_t label, int64_t kind, int64_t place, int64_t blocks, char *out) {
    uint32_t start[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574}; /* words of a little-endian processor */
    memcpy(start + 4, key, 32);
    memcpy(start + 13, &label, 8);
    for (int64_t i = 0, some; i < blocks; i += some) {
        const int64_t here = place + i, before = ((int64_t)1 << 32) - (here & 0xffffffff);
        some = blocks - i < LANES ? blocks - i : LANES;
        if (some > before) some = before; /* where the counter ends, the nonce goes on */
        start[12] = (uint32_t)here;
        start[15] = (uint32_t)(kind + (here >> 32) * 2);
        CALL(chacha, start, some, out + 64 * i);
    }
}

/* How many numbers `dpsco_outer` needs besides. */
API int64_t dpsco_outer_space(int64_t n, int64_t out) { return (n + 1) * (out + HIGH) + n * PANELS * BROAD; }

/* total[o][j] = sum_i weights[i] g[i][o] x[i][j], float32, and bias[o] = sum_i weights[i] g[i][o]: of n rows, g of out
   numbers and x of d. Products with the weight are rounded to float32, and added up in float32 for `tile` rows, whose
   sums are added in float64. Rows of weight 0 count for nothing. */
API void dpsco_outer(const float *g, int64_t g_stride, int64_t out, const float *rows, int64_t stride, int64_t n,
                     int64_t d, const double *weights, int64_t tile, float *space, float *total, double *bias) {
    rows_t x = {rows, 0, stride, n, d};
    CALL(outer, g, g_stride, out, &x, weights, tile, space, total, bias);
}

/* Sums of weighted gradients in the point, `padded` numbers, and of losses, 1: of each block of rows, which are added
   up in pairs, so that the first row of `sums` has all of them. The loss of a score is logistic (CURVED), or one
   whose slope is a line between two bounds (BENT); see `curved` and `bent` for the columns; or slopes are the only
   column (FIXED). The point is padded with zeros to a multiple of 4; scratch has room for BATCH such rows, and is 0.
   Images are computed, or read where they are kept: n + GROUP rows of `padded` numbers. bends[i] = second derivative,
   weighted, unless they are not wanted; found[i] = score, likewise. */
API void dpsco_scored(const void *rows, int64_t wide, int64_t stride, int64_t d, const double *numbers, int64_t width,
                      const double *norms, int64_t n, const double *shares, const double *kept, const double *columns,
                      int64_t kind, double gain, const double *point, int64_t padded, int64_t block, double *scratch,
                      double *sums, double *bends, double *found) {
    table_t x = {rows, numbers, wide, stride, d, width, norms};
    const int64_t size = padded + 1;
    for (int64_t from = 0; from < n; from += block)
        CALL(scored, &x, from, n - from < block ? n : from + block, n, shares, kept, columns, kind, gain, point, padded,
             scratch, sums + from / block * size, bends, found);
    fold(sums, (n + block - 1) / block, size);
}

/* Sums of weighted gradients in `classes` points, and of losses, 1, of the softmax cross-entropy; columns are weight,
   class, and the largest norm of the slopes, to which they are cut. Scratch has room for GROUP rows and as many
   numbers for each class; the rest as in `dpsco_scored`. */
API void dpsco_classes(const void *rows, int64_t wide, int64_t stride, int64_t d, const double *numbers, int64_t width,
                       const double *norms, int64_t n, const double *shares, const double *kept, const double *columns,
                       const double *points, int64_t classes, int64_t padded, int64_t block, double *scratch,
                       double *sums) {
    table_t x = {rows, numbers, wide, stride, d, width, norms};
    const int64_t size = classes * padded + 1;
    for (int64_t from = 0; from < n; from += block)
        CALL(classes, &x, from, n - from < block ? n : from + block, n, shares, kept, columns, points, classes, padded,
             scratch, sums + from / block * size);
    fold(sums, (n + block - 1) / block, size);
}

/* Sum of the weights of records whose value is at most this: of blocks, which are added up as in `dpsco_scored`. */
API void dpsco_below(const double *values, const double *weights, int64_t n, double most, int64_t block, double *sums) {
    for (int64_t from = 0; from < n; from += block)
        sums[from / block] = CALL(below, values + from, weights + from, n - from < block ? n - from : block, most);
    fold(sums, (n + block - 1) / block, 1);
}

#else /* once for each kind of processor */

TARGET static inline f8 NAME(load8)(const float *p) {
    f8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

TARGET static inline d4 NAME(wide4)(const float *p) {
    f4 v;
    memcpy(&v, p, sizeof v);
    return WIDE(v);
}

TARGET static inline d4 NAME(load4)(const double *p) {
    d4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

TARGET static inline f4 NAME(load_f4)(const float *p) {
    f4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Products of GROUP rows with the weight; each by the same operations. Fetches rows that come later. */
TARGET static inline d4 NAME(scores)(const float *const p[GROUP], const float *const later[GROUP], const float *weight,
                                     int64_t d) {
    f8 a[GROUP] = {{0}}, b[GROUP] = {{0}};
    int64_t j = 0;
    for (; j + 16 <= d; j += 16) {
        f8 low = NAME(load8)(weight + j), high = NAME(load8)(weight + j + 8);
        for (int r = 0; r < GROUP; r++) {
            a[r] += NAME(load8)(p[r] + j) * low;
            b[r] += NAME(load8)(p[r] + j + 8) * high;
            __builtin_prefetch(later[r] + j, 0, 1);
        }
    }
    d4 score;
    for (int r = 0; r < GROUP; r++) {
        f8 sum = a[r] + b[r];
        f4 rest = {0};
        int64_t k = j;
        for (; k + 4 <= d; k += 4) rest += NAME(load_f4)(p[r] + k) * NAME(load_f4)(weight + k);
        for (; k < d; k++) rest[0] += p[r][k] * weight[k];
        rest += (f4){sum[0], sum[1], sum[2], sum[3]} + (f4){sum[4], sum[5], sum[6], sum[7]};
        score[r] = (rest[0] + rest[1]) + (rest[2] + rest[3]);
    }
    return score;
}

/* Those of a where the mask is set, and those of b elsewhere. */
TARGET static inline d4 NAME(where)(i4 mask, d4 a, d4 b) { return (d4)(((i4)a & mask) | ((i4)b & ~mask)); }

/* 1 / (1 + exp(-t)); exp by t = k log 2 + r and Taylor's polynomial, to 1e-11. */
TARGET static inline d4 NAME(sigmoid)(d4 t) {
    const d4 most = {700.0, 700.0, 700.0, 700.0};
    t = NAME(where)(t > most, most, NAME(where)(t < -most, -most, t));
    d4 shifted = t * -0x1.71547652b82fep+0 + 0x1.8p52, k = shifted - 0x1.8p52;
    d4 r = (-t - k * 0x1.62e42fefa39efp-1) - k * 0x1.abc9e3b39803fp-56;
    d4 e = r * (1.0 / 362880.0) + 1.0 / 40320.0;
    e = e * r + 1.0 / 5040.0;
    e = e * r + 1.0 / 720.0;
    e = e * r + 1.0 / 120.0;
    e = e * r + 1.0 / 24.0;
    e = e * r + 1.0 / 6.0;
    e = e * r + 0.5;
    e = e * r + 1.0;
    e = e * r + 1.0;
    return 1.0 / (1.0 + (d4)((u4)e + ((u4)shifted << 52))) + (t - t); /* NaN for NaN */
}

/* Derivatives of the losses in the score, rounded to float32 as rows are. SIGN takes the opposite of the label. */
TARGET static inline d4 NAME(slopes)(int64_t kind, d4 score, d4 target) {
    d4 slope = target; /* GIVEN */
    if (kind == SIGN) slope = NAME(sigmoid)(score * target) * target;
    if (kind == LOGISTIC) slope = NAME(sigmoid)(score) - target;
    if (kind == SQUARE) slope = (score - target) * 2.0;
    return WIDE(NARROW(slope));
}

/* Factors of (x, 1): slope * factor cut to [-limit, limit], over factor; 0 for rows that must not count. */
TARGET static inline d4 NAME(weights)(d4 slope, d4 factor, double limit, double scale) {
    const d4 most = {limit, limit, limit, limit}, infinite = {INFINITY, INFINITY, INFINITY, INFINITY};
    const d4 largest = {LARGEST, LARGEST, LARGEST, LARGEST};
    d4 length = slope * factor;
    i4 counts = (length < infinite) & (length > -infinite) & (factor < largest);
    d4 cut = NAME(where)(length > most, most, NAME(where)(length < -most, -most, length));
    return (d4)((i4)(cut / factor * scale) & counts);
}

/* out += sum_r weight[r] row r, for GROUP rows; those of weight 0 count for nothing, whatever is in them. Fetches the
   rows that come next. */
TARGET static inline void NAME(add)(const float *p[GROUP], const double weight[GROUP], const float *const next[GROUP],
                                    int64_t d, double *out) {
    d4 w[GROUP];
    const float *kept = 0;
    for (int r = 0; r < GROUP; r++) {
        w[r] = (d4){weight[r], weight[r], weight[r], weight[r]};
        if (weight[r] != 0.0) kept = p[r];
    }
    if (!kept) return;
    for (int r = 0; r < GROUP; r++)
        if (weight[r] == 0.0) p[r] = kept; /* finite, as it counts */
    int64_t j = 0;
    for (; j + 16 <= d; j += 16) {
        for (int r = 0; r < GROUP; r++) __builtin_prefetch(next[r] + j, 0, 1);
        for (int half = 0; half < 16; half += 8) {
            d4 low = NAME(load4)(out + j + half), high = NAME(load4)(out + j + half + 4);
            for (int r = 0; r < GROUP; r++) {
                low += w[r] * NAME(wide4)(p[r] + j + half);
                high += w[r] * NAME(wide4)(p[r] + j + half + 4);
            }
            memcpy(out + j + half, &low, sizeof low);
            memcpy(out + j + half + 4, &high, sizeof high);
        }
    }
    for (; j + 4 <= d; j += 4) {
        d4 low = NAME(load4)(out + j);
        for (int r = 0; r < GROUP; r++) low += w[r] * NAME(wide4)(p[r] + j);
        memcpy(out + j, &low, sizeof low);
    }
    for (; j < d; j++)
        for (int r = 0; r < GROUP; r++) out[j] += w[r][0] * p[r][j];
}

/* Pointers to the GROUP rows from i on; the last row stands for those that are missing. */
TARGET static inline void NAME(group)(const rows_t *x, int64_t i, const float *p[GROUP]) {
    for (int r = 0; r < GROUP; r++) p[r] = row_at(x, i + r < x->n ? i + r : x->n - 1);
}

TARGET static void NAME(weighted)(const rows_t *x, const double *weights, double *out) {
    for (int64_t i = 0; i < x->n; i += GROUP) {
        const float *p[GROUP], *next[GROUP];
        double w[GROUP] = {0.0};
        NAME(group)(x, i, p);
        NAME(group)(x, i + GROUP, next);
        for (int r = 0; r < GROUP && i + r < x->n; r++) w[r] = weights[i + r];
        NAME(add)(p, w, next, x->d, out);
    }
}

/* Upper bounds of the norms of GROUP rows, each by the same operations. Fetches the rows that come next. */
TARGET static inline d4 NAME(bounds)(const float *const p[GROUP], const float *const next[GROUP], int64_t d) {
    d4 squares = {0};
    int64_t j = 0;
    while (j + 16 <= d) {
        int64_t end = j + PIECE < d ? j + PIECE : d;
        f8 a[GROUP] = {{0}}, b[GROUP] = {{0}};
        for (; j + 16 <= end; j += 16)
            for (int r = 0; r < GROUP; r++) {
                f8 low = NAME(load8)(p[r] + j), high = NAME(load8)(p[r] + j + 8);
                __builtin_prefetch(next[r] + j, 0, 1);
                a[r] += low * low;
                b[r] += high * high;
            }
        for (int r = 0; r < GROUP; r++) {
            f8 both = a[r] + b[r];
            f4 half[2];
            memcpy(half, &both, sizeof half);
            d4 sum = WIDE(half[0]) + WIDE(half[1]);
            squares[r] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
        }
    }
    for (; j < d; j++)
        for (int r = 0; r < GROUP; r++) squares[r] += (double)p[r][j] * p[r][j];
    const d4 largest = {LARGEST, LARGEST, LARGEST, LARGEST}, infinite = {INFINITY, INFINITY, INFINITY, INFINITY};
    d4 norm = ROOT(squares);
    return NAME(where)(norm >= largest, infinite, norm * (1.0 + NORM_ERROR) + HIDDEN * sqrt((double)d));
}

TARGET static void NAME(norms)(const rows_t *x, double *out) {
    for (int64_t i = 0; i < x->n; i += GROUP) {
        const float *p[GROUP], *next[GROUP];
        NAME(group)(x, i, p);
        NAME(group)(x, i + GROUP, next);
        d4 found = NAME(bounds)(p, next, x->d);
        for (int r = 0; r < GROUP && i + r < x->n; r++) out[i + r] = found[r];
    }
}

TARGET static void NAME(linear)(const rows_t *x, const float *weight, float bias, int64_t kind, const float *targets,
                                const double *factors, double limit, double scale, double *out) {
    int64_t groups = CACHED / GROUP / (x->d > 0 ? x->d : 1);
    groups = groups > MOST ? MOST : groups < 1 ? 1 : groups;
    for (int64_t start = 0; start < x->n; start += groups * GROUP) {
        const float *p[2 * MOST][GROUP]; /* of the block, and of the one after it */
        d4 w[MOST] = {{0}};
        int64_t count = (x->n - start + GROUP - 1) / GROUP;
        if (count > groups) count = groups;
        for (int64_t g = 0; g < count + groups; g++) NAME(group)(x, start + g * GROUP, p[g]);
        for (int64_t g = 0; g < count && kind != GIVEN; g++) {
            const float *const *later = (const float *const *)p[groups > 1 ? g + groups : g];
            w[g] = NAME(scores)((const float *const *)p[g], later, weight, x->d);
        }
        for (int64_t g = 0; g < count; g++) {
            d4 target = {0}, factor = {INFINITY, INFINITY, INFINITY, INFINITY}; /* which counts for nothing */
            d4 norm = {0};
            if (!factors) norm = NAME(bounds)((const float *const *)p[g], (const float *const *)p[g + 1], x->d);
            for (int64_t r = 0, i = start + g * GROUP; r < GROUP && i + r < x->n; r++) {
                int64_t at = x->index ? x->index[i + r] : i + r;
                target[r] = targets[at];
                factor[r] = factors ? factors[at] : sqrt(norm[r] * norm[r] + 1.0) * (1.0 + FACTOR_ERROR);
            }
            w[g] = NAME(weights)(NAME(slopes)(kind, w[g] + (double)bias, target), factor, limit, scale);
        }
        for (int64_t g = 0; g < count; g++) {
            double found[GROUP] = {w[g][0], w[g][1], w[g][2], w[g][3]};
            NAME(add)(p[g], found, (const float *const *)p[g + 1], x->d, out);
            out[x->d] += (found[0] + found[1]) + (found[2] + found[3]);
        }
    }
}

TARGET static void NAME(derivatives)(const rows_t *x, const float *weight, float bias, int64_t kind,
                                     const float *targets, float *out) {
    for (int64_t i = 0; i < x->n; i += GROUP) {
        const float *p[GROUP];
        d4 target = {0};
        NAME(group)(x, i, p);
        for (int64_t r = 0; r < GROUP && i + r < x->n; r++) target[r] = targets[i + r];
        d4 found = NAME(slopes)(kind, NAME(scores)(p, p, weight, x->d) + (double)bias, target);
        for (int64_t r = 0; r < GROUP && i + r < x->n; r++) out[i + r] = found[r];
    }
}

/* Sum of n squares. */
TARGET static inline double NAME(squares)(const double *p, int64_t n) {
    d4 sums[4] = {{0}}, a;
    int64_t j = 0;
    for (; j + 16 <= n; j += 16)
        for (int k = 0; k < 4; k++) a = NAME(load4)(p + j + 4 * k), sums[k] += a * a;
    a = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (; j < n; j++) a[0] += p[j] * p[j];
    return (a[0] + a[1]) + (a[2] + a[3]);
}

/* Images of `count` <= GROUP rows, `step` apart: ((row * before - center) * factor) * after, and the constant; 0 where
   there is nothing after. Always the same code, so that a row has one image. */
TARGET static inline void NAME(image_of)(const table_t *x, const void *const p[GROUP], int wide, const double *before,
                                         const double *after, int moved, double *const q[GROUP]) {
    const double *center = x->numbers + 5, *factor = center + x->d;
    int64_t j = 0;
    const int64_t ahead = BATCH * x->stride * (wide ? 8 : 4); /* the rows that come next are fetched */
    d4 first[GROUP], last[GROUP], by = {0}, shift = {0};
    for (int r = 0; r < GROUP; r++)
        for (int k = 0; k < 4; k++) first[r][k] = before[r], last[r][k] = after[r];
    for (; j + 4 <= x->d; j += 4) {
        if (moved) shift = NAME(load4)(center + j), by = NAME(load4)(factor + j);
        for (int r = 0; r < GROUP; r++) {
            d4 v = wide ? NAME(load4)((const double *)p[r] + j) : NAME(wide4)((const float *)p[r] + j);
            if (j % 8 == 0) __builtin_prefetch((const char *)p[r] + ahead + (wide ? 8 : 4) * j, 0, 2);
            v *= first[r];
            if (moved) v = (v - shift) * by;
            v *= last[r];
            memcpy(q[r] + j, &v, sizeof v);
        }
    }
    for (; j < x->d; j++)
        for (int r = 0; r < GROUP; r++) {
            double v = (wide ? ((const double *)p[r])[j] : ((const float *)p[r])[j]) * before[r];
            if (moved) v = (v - center[j]) * factor[j];
            q[r][j] = v * after[r];
        }
}

TARGET static ONE void NAME(image)(const table_t *x, int64_t i, int64_t count, const double *before,
                                   const double *after, int moved, double *out, int64_t step) {
    const double constant = x->numbers[2];
    const void *p[GROUP];
    double first[GROUP], then[GROUP], *q[GROUP];
    for (int64_t r = 0; r < GROUP; r++) { /* the last row stands for those that are missing */
        int64_t k = r < count ? r : count - 1;
        p[r] = (const char *)x->rows + (i + k) * x->stride * (x->wide ? 8 : 4);
        first[r] = before[k], then[r] = after[k], q[r] = out + k * step;
    }
    moved = moved && x->numbers[4] != 0.0;
    if (x->wide && moved)
        NAME(image_of)(x, p, 1, first, then, 1, q);
    else if (x->wide)
        NAME(image_of)(x, p, 1, first, then, 0, q);
    else if (moved)
        NAME(image_of)(x, p, 0, first, then, 1, q);
    else
        NAME(image_of)(x, p, 0, first, then, 0, q);
    for (int64_t r = 0; r < count; r++) {
        if (x->width > x->d) q[r][x->d] = x->numbers[3] != 0.0 ? constant * then[r] : constant;
        if (x->norms) { /* a row that was written to since it was measured, and is longer now, counts for nothing */
            double most = x->norms[i + r] * x->norms[i + r] * (1.0 + (x->width + 16) * 0x1p-50) + 1e-300;
            if (!(NAME(squares)(q[r], x->width) <= most)) then[r] = 0.0;
        }
        if (then[r] == 0.0) memset(q[r], 0, 8 * x->width);
    }
}

/* Images of GROUP rows; 0 for those of weight 0, whatever is in them, as where rows are missing. */
TARGET static inline void NAME(counted)(const table_t *x, int64_t i, int64_t count, const double *before,
                                        const double *after, const double weights[GROUP], double *p, int64_t step) {
    NAME(image)(x, i, count, before, after, 1, p, step);
    for (int64_t r = 0; r < GROUP; r++)
        if (weights[r] == 0.0) memset(p + r * step, 0, 8 * x->width);
}

TARGET static void NAME(measure)(const table_t *x, int64_t n, double *scratch, double *shares, double *norms) {
    static const double ones[GROUP] = {1.0, 1.0, 1.0, 1.0};
    for (int64_t i = 0; i < n; i += GROUP) {
        int64_t count = n - i < GROUP ? n - i : GROUP;
        double *before = shares + i, *after = before + n;
        if (x->numbers[0] < INFINITY) NAME(image)(x, i, count, ones, ones, 0, scratch, x->width);
        for (int64_t r = 0; r < count; r++) {
            const double *p = scratch + r * x->width;
            before[r] = 1.0;
            if (x->numbers[0] < INFINITY) before[r] = share_of(sqrt(NAME(squares)(p, x->d)), p, x->d, x->numbers[0]);
        }
        NAME(image)(x, i, count, before, ones, 1, scratch, x->width);
        for (int64_t r = 0; r < count; r++) {
            const double *p = scratch + r * x->width;
            double norm = sqrt(NAME(squares)(p, x->d)), constant = x->numbers[2];
            after[r] = before[r] == 0.0 ? 0.0 : share_of(norm, p, x->d, x->numbers[1]);
            norm = after[r] < 1.0 && !(norm > TINY && norm < VAST) ? x->numbers[1] : norm * after[r];
            if (x->numbers[3] != 0.0) constant *= after[r];
            if (constant != 0.0) norm = sqrt(norm * norm + constant * constant);
            norms[i + r] = after[r] == 0.0 ? INFINITY : norm;
        }
    }
}

/* exp(-t) for t in [0, 700]: t = r - k log 2 with |r| below 0.35 and Taylor's polynomial; k times the first part of
   log 2 is exact. */
TARGET static inline d4 NAME(exp_minus)(d4 t) {
    d4 shifted = t * -0x1.71547652b82fep+0 + 0x1.8p52, k = shifted - 0x1.8p52;
    d4 r = (-t - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;
    d4 e = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    e = e * r + 1.0 / 39916800.0;
    e = e * r + 1.0 / 3628800.0;
    e = e * r + 1.0 / 362880.0;
    e = e * r + 1.0 / 40320.0;
    e = e * r + 1.0 / 5040.0;
    e = e * r + 1.0 / 720.0;
    e = e * r + 1.0 / 120.0;
    e = e * r + 1.0 / 24.0;
    e = e * r + 1.0 / 6.0;
    e = e * r + 0.5;
    e = e * r + 1.0;
    e = e * r + 1.0;
    return (d4)((u4)e + ((u4)shifted << 52));
}

/* log(1 + e) for e in [0, 1]: 2 artanh(e / (2 + e)). */
TARGET static inline d4 NAME(log_plus)(d4 e) {
    d4 s = e / (e + 2.0), z = s * s, sum = z * (1.0 / 33.0) + 1.0 / 31.0;
    sum = sum * z + 1.0 / 29.0;
    sum = sum * z + 1.0 / 27.0;
    sum = sum * z + 1.0 / 25.0;
    sum = sum * z + 1.0 / 23.0;
    sum = sum * z + 1.0 / 21.0;
    sum = sum * z + 1.0 / 19.0;
    sum = sum * z + 1.0 / 17.0;
    sum = sum * z + 1.0 / 15.0;
    sum = sum * z + 1.0 / 13.0;
    sum = sum * z + 1.0 / 11.0;
    sum = sum * z + 1.0 / 9.0;
    sum = sum * z + 1.0 / 7.0;
    sum = sum * z + 1.0 / 5.0;
    sum = sum * z + 1.0 / 3.0;
    return (s + s) + (s + s) * (z * sum);
}

/* Logistic loss of four records, straight below its corner, its slope and second derivative, weighted; columns are BATCH
   long: weight, target, limit of the slope, corner, loss there. NaN for a score that is not finite. */
TARGET static inline void NAME(curved)(d4 score, const double *columns, d4 *loss, d4 *slope, d4 *bend) {
    const d4 zero = {0}, most = {700.0, 700.0, 700.0, 700.0};
    d4 weight = NAME(load4)(columns), target = NAME(load4)(columns + BATCH), limit = NAME(load4)(columns + 2 * BATCH);
    d4 corner = NAME(load4)(columns + 3 * BATCH), margin = target * score;
    d4 size = NAME(where)(margin < zero, -margin, margin);
    d4 e = NAME(exp_minus)(NAME(where)(size < most, size, most)) + (margin - margin), part = 1.0 / (e + 1.0);
    d4 pull = -target * NAME(where)(margin < zero, part, e * part);
    d4 curve = NAME(where)(margin < zero, size, zero) + NAME(log_plus)(e);
    d4 line = NAME(load4)(columns + 4 * BATCH) + limit * (corner - margin);
    *loss = weight * NAME(where)(margin < corner, line, curve);
    *slope = weight * NAME(where)(pull > limit, limit, NAME(where)(pull < -limit, -limit, pull));
    *bend = (d4)((i4)(weight * target * target * (e * part * part)) & (pull < limit) & (pull > -limit));
}

/* Adds the products of at most BATCH rows from `start` on, on the diagonal and above it: in tiles of 4 x 8. */
TARGET static void NAME(gram)(const table_t *x, int64_t start, int64_t n, const double *before, const double *after,
                              const double *weights, int64_t padded, double *scratch, double *out) {
    double *scaled = scratch + BATCH * padded;
    for (int64_t r = 0; r < n; r += GROUP) {
        double weight[GROUP] = {0}, *p = scratch + r * padded, *q = scaled + r * padded;
        int64_t few = n - r < GROUP ? n - r : GROUP;
        memcpy(weight, weights + start + r, 8 * few);
        NAME(counted)(x, start + r, few, before + r, after + r, weight, p, padded);
        for (int64_t k = 0; k < GROUP; k++)
            for (int64_t j = 0; j < x->width; j++) q[k * padded + j] = weight[k] * p[k * padded + j];
    }
    for (int64_t i = 0; i < padded; i += 4)
        for (int64_t j = i / 8 * 8; j < padded; j += 8) {
            d4 low[4] = {{0}}, high[4] = {{0}};
            for (int64_t r = 0; r < n; r++) {
                const double *p = scratch + r * padded + j, *q = scaled + r * padded + i;
                d4 a = NAME(load4)(p), b = NAME(load4)(p + 4);
                for (int k = 0; k < 4; k++) low[k] += q[k] * a, high[k] += q[k] * b;
            }
            for (int k = 0; k < 4; k++) {
                double *p = out + (i + k) * padded + j;
                d4 a = NAME(load4)(p) + low[k], b = NAME(load4)(p + 4) + high[k];
                memcpy(p, &a, sizeof a);
                memcpy(p + 4, &b, sizeof b);
            }
        }
}

/* Unsigned numbers below 2^63 in float64, rounded once: high and low halves are exact. */
TARGET static inline d4 NAME(rounded)(u4 k, double less, double more) {
    const u4 two52 = {0x4330000000000000, 0x4330000000000000, 0x4330000000000000, 0x4330000000000000};
    d4 high = (d4)((k >> 32) | two52) - 0x1p52, low = (d4)((k & 0xffffffff) | two52) - 0x1p52;
    return (high * 0x1p32 - less) + (low + more);
}

/* log v of normal v in (0, 1]: v = 2^e m with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh((m - 1) / (m + 1)). */
TARGET static inline d4 NAME(log4)(d4 v) {
    const u4 root = {0x3fe6a09e667f3bcd, 0x3fe6a09e667f3bcd, 0x3fe6a09e667f3bcd, 0x3fe6a09e667f3bcd};
    const u4 two52 = {0x4330000000000000, 0x4330000000000000, 0x4330000000000000, 0x4330000000000000};
    u4 bits = (u4)v, up = (bits - root + ((uint64_t)2048 << 52)) >> 52; /* e + 2048 */
    d4 e = (d4)((up & 4095) | two52) - (0x1p52 + 2048.0);
    d4 m = (d4)(bits - ((up - 2048) << 52)), s = (m - 1.0) / (m + 1.0), z = s * s;
    d4 sum = z * (1.0 / 21.0) + 1.0 / 19.0;
    sum = sum * z + 1.0 / 17.0;
    sum = sum * z + 1.0 / 15.0;
    sum = sum * z + 1.0 / 13.0;
    sum = sum * z + 1.0 / 11.0;
    sum = sum * z + 1.0 / 9.0;
    sum = sum * z + 1.0 / 7.0;
    sum = sum * z + 1.0 / 5.0;
    sum = sum * z + 1.0 / 3.0;
    s += s;
    return e * 0x1.62e42fefa39efp-1 + (s + s * (z * sum));
}

TARGET static inline d4 NAME(log_of)(const void *words) {
    i4 w;
    memcpy(&w, words, sizeof w);
    return NAME(log4)(NAME(rounded)((u4)(w ^ (w < 0)), 0.0, 0.5) * 0x1p-63);
}

TARGET static int64_t NAME(logs)(const char *words, int64_t n, double low, double high, double *values) {
    const d4 lowest = {low, low, low, low}, highest = {high, high, high, high};
    i4 inside = {0};
    int64_t i = 0, rest = n % 4, last[4] = {0};
    for (; i < n - rest; i += 4) {
        d4 v = NAME(log_of)(words + 8 * i);
        inside -= (v > lowest) & (v < highest);
        memcpy(values + i, &v, sizeof v);
    }
    memcpy(last, words + 8 * i, 8 * rest);
    d4 v = NAME(log_of)(last);
    for (int k = 0; k < rest; k++) {
        values[i + k] = v[k];
        inside[0] += v[k] > low && v[k] < high;
    }
    return n - inside[0] - inside[1] - inside[2] - inside[3];
}

TARGET static int64_t NAME(gaps)(const char *words, int64_t n, double log_miss, double room, int64_t size, int64_t last,
                                 int64_t *places) {
    const double most = size + 1.0; /* a gap that leads outside */
    for (int64_t i = 0; i < n; i += 4) {
        int64_t few = n - i < 4 ? n - i : 4;
        u4 w = {0};
        memcpy(&w, words + 8 * i, 8 * few);
        w >>= 1;
        d4 quotient = NAME(log4)(NAME(rounded)(w, 0.0, 0.5) * 0x1p-63) / log_miss;
        for (int64_t r = 0; r < few; r++) {
            int64_t gap = quotient[r] < most ? (int64_t)quotient[r] : size + 1;
            double beside = quotient[r] - (double)gap;
            if (w[r] < FEW || (quotient[r] <= most + room && !(beside > room && beside < 1.0 - room))) return -1;
            places[i + r] = last += gap + 1;
            if (last >= size) return i + r + 1;
        }
    }
    return n;
}

/* Sine and cosine of 2 pi j / 2^64: to the nearest quarter of a turn, then Taylor's polynomials on [-pi/4, pi/4]. */
TARGET static inline void NAME(turn)(u4 j, d4 *cosine, d4 *sine) {
    u4 quarter = (j + ((uint64_t)1 << 61)) >> 62, rest = j + ((uint64_t)1 << 61) - (quarter << 62);
    d4 t = NAME(rounded)(rest, 0x1p61, 0.0) * (6.283185307179586476925 * 0x1p-64), z = t * t;
    d4 s = z * (-1.0 / 1307674368000.0) + 1.0 / 6227020800.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    s = t + t * (z * s);
    d4 c = z * (1.0 / 20922789888000.0) - 1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = c * z - 0.5;
    c = 1.0 + z * c;
    u4 odd = (u4)((i4)(quarter << 63) < 0);
    u4 x = ((u4)c & ~odd) | ((u4)s & odd), y = ((u4)s & ~odd) | ((u4)c & odd);
    *cosine = (d4)(x ^ (((quarter + 1) & 2) << 62)); /* negative in the 2nd and 3rd */
    *sine = (d4)(y ^ ((quarter & 2) << 62));         /* in the 3rd and 4th */
}

/* Four pairs: cosines in x, sines in y. */
TARGET static inline void NAME(pairs)(const double *logs, u4 angles, double scale, d4 *x, d4 *y) {
    d4 square = NAME(load4)(logs) * -2.0, radius = ROOT(square) * scale;
    NAME(turn)(angles, x, y);
    *x *= radius;
    *y *= radius;
}

TARGET static void NAME(polar64)(const double *logs, const char *angles, int64_t n, int64_t n_second, double scale,
                                 const double *plus, const double *also, double *first, double *second) {
    int64_t i = 0, rest = n % 4;
    d4 x, y;
    for (; i < n - rest && i + 4 <= n_second; i += 4) {
        u4 j;
        memcpy(&j, angles + 8 * i, sizeof j);
        NAME(pairs)(logs + i, j, scale, &x, &y);
        if (plus) x += NAME(load4)(plus + i), y += NAME(load4)(also + i);
        memcpy(first + i, &x, sizeof x);
        memcpy(second + i, &y, sizeof y);
    }
    for (; i < n; i++) {
        double last[4] = {logs[i]};
        uint64_t angle;
        memcpy(&angle, angles + 8 * i, sizeof angle);
        NAME(pairs)(last, (u4){angle}, scale, &x, &y);
        first[i] = (double)(plus ? plus[i] + x[0] : x[0]);
        if (i < n_second) second[i] = (double)(plus ? also[i] + y[0] : y[0]);
    }
}

TARGET static void NAME(polar32)(const double *logs, const char *angles, int64_t n, int64_t n_second, double scale,
                                 const double *plus, const double *also, float *first, float *second) {
    int64_t i = 0, rest = n % 4;
    d4 x, y;
    for (; i < n - rest && i + 4 <= n_second; i += 4) {
        v4 j;
        memcpy(&j, angles + 4 * i, sizeof j);
        NAME(pairs)(logs + i, TURNS(j), scale, &x, &y);
        if (plus) x += NAME(load4)(plus + i), y += NAME(load4)(also + i);
        f4 a = NARROW(x), b = NARROW(y);
        memcpy(first + i, &a, sizeof a);
        memcpy(second + i, &b, sizeof b);
    }
    for (; i < n; i++) {
        double last[4] = {logs[i]};
        uint32_t angle;
        memcpy(&angle, angles + 4 * i, sizeof angle);
        NAME(pairs)(last, (u4){(uint64_t)angle << 32}, scale, &x, &y);
        first[i] = (float)(plus ? plus[i] + x[0] : x[0]);
        if (i < n_second) second[i] = (float)(plus ? also[i] + y[0] : y[0]);
    }
}

TARGET static inline f8 NAME(where8)(i8 mask, f8 a, f8 b) { return (f8)(((i8)a & mask) | ((i8)b & ~mask)); }

/* log V, as `log4`; for V near 1, m - 1 is -(1 - V), rounded by itself. */
TARGET static inline f8 NAME(log8)(f8 v, f8 rest) {
    i8 up = ((i8)v - 0x3f3504f3) >> 23, near = up == 0;
    f8 m = (f8)((u8)v - ((u8)up << 23)), s = NAME(where8)(near, -rest, m - 1.0f) / (m + 1.0f), z = s * s;
    f8 sum = z * (1.0f / 9.0f) + 1.0f / 7.0f;
    sum = sum * z + 1.0f / 5.0f;
    sum = sum * z + 1.0f / 3.0f;
    s += s;
    return __builtin_convertvector(up, f8) * 0.693147181f + (s + s * (z * sum));
}

/* Sine and cosine of 2 pi j / 2^32, as `turn`. */
TARGET static inline void NAME(turn8)(u8 j, f8 *cosine, f8 *sine) {
    u8 quarter = (j + (1u << 29)) >> 30;
    f8 t = __builtin_convertvector((i8)(j - (quarter << 30)), f8) * (6.28318531f * 0x1p-32f), z = t * t;
    f8 s = z * (1.0f / 362880.0f) - 1.0f / 5040.0f;
    s = s * z + 1.0f / 120.0f;
    s = s * z - 1.0f / 6.0f;
    s = t + t * (z * s);
    f8 c = z * (-1.0f / 3628800.0f) + 1.0f / 40320.0f;
    c = c * z - 1.0f / 720.0f;
    c = c * z + 1.0f / 24.0f;
    c = c * z - 0.5f;
    c = 1.0f + z * c;
    i8 odd = (i8)(quarter << 31) < 0;
    *cosine = (f8)((u8)NAME(where8)(odd, s, c) ^ (((quarter + 1) & 2) << 30));
    *sine = (f8)((u8)NAME(where8)(odd, c, s) ^ ((quarter & 2) << 30));
}

/* Eight pairs of float32, in float32; returns minus 1 for each logarithm in (low, high). */
TARGET static inline i8 NAME(eight)(const char *words, const char *angles, float scale, float low, float high, float *x,
                                    float *y) {
    d4 both[2];
    u8 angle;
    f8 cosine, sine;
    memcpy(&angle, angles, sizeof angle);
    for (int k = 0; k < 2; k++) {
        i4 w;
        memcpy(&w, words + 32 * k, sizeof w);
        both[k] = NAME(rounded)((u4)(w ^ (w < 0)), 0.0, 0.5) * 0x1p-63;
    }
    f8 value = NAME(log8)(JOIN(NARROW(both[0]), NARROW(both[1])), JOIN(NARROW(1.0 - both[0]), NARROW(1.0 - both[1])));
    f8 square = value * -2.0f, radius = ROOT8(square) * scale;
    NAME(turn8)(angle, &cosine, &sine);
    cosine *= radius;
    sine *= radius;
    memcpy(x, &cosine, sizeof cosine);
    memcpy(y, &sine, sizeof sine);
    return (value > low) & (value < high);
}

TARGET static int64_t NAME(single)(const char *words, const char *angles, int64_t n, int64_t n_second, float scale,
                                   float low, float high, float *first, float *second) {
    int64_t i = 0, outside = n;
    i8 found = {0};
    for (; i + 8 <= n && i + 8 <= n_second; i += 8)
        found += NAME(eight)(words + 8 * i, angles + 4 * i, scale, low, high, first + i, second + i);
    for (int k = 0; k < 8; k++) outside += found[k];
    if (i == n) return outside;
    char word[64] = {0}, angle[32] = {0};
    float x[8], y[8];
    memcpy(word, words + 8 * i, 8 * (n - i));
    memcpy(angle, angles + 4 * i, 4 * (n - i));
    found = NAME(eight)(word, angle, scale, low, high, x, y);
    memcpy(first + i, x, 4 * (n - i));
    memcpy(second + i, y, 4 * (n_second - i));
    for (int k = 0; k < n - i; k++) outside += found[k];
    return outside;
}

/* sum += the products of packed backprops, (n, HIGH), with packed inputs, (n, BROAD). */
TARGET static inline void NAME(products)(const float *g, const float *x, int64_t n, int64_t tile,
                                         d4 sum[HIGH][BROAD / 4]) {
    for (int64_t start = 0; start < n; start += tile) {
        int64_t end = start + tile < n ? start + tile : n;
        f8 part[HIGH][2] = {{{0}}};
        for (int64_t i = start; i < end; i++) {
            f8 low = NAME(load8)(x + i * BROAD), high = NAME(load8)(x + i * BROAD + 8);
#pragma GCC unroll 6
            for (int o = 0; o < HIGH; o++) {
                float w = g[i * HIGH + o];
                f8 v = {w, w, w, w, w, w, w, w};
                part[o][0] += v * low;
                part[o][1] += v * high;
            }
        }
#pragma GCC unroll 6
        for (int o = 0; o < HIGH; o++)
#pragma GCC unroll 4
            for (int k = 0; k < BROAD / 4; k++) {
                f4 v;
                memcpy(&v, (const char *)part[o] + 16 * k, sizeof v);
                sum[o][k] += WIDE(v);
            }
    }
}

#ifdef LONGER
/* The same numbers for two blocks of backprops, in vectors of 16. */
__attribute__((target("avx512f,avx2,fma"))) static void NAME(longer)(const float *g, const float *x, int64_t n,
                                                                     int64_t tile, d4 sum[2 * HIGH][BROAD / 4]) {
    const float *h = g + n * HIGH;
    for (int64_t start = 0; start < n; start += tile) {
        int64_t end = start + tile < n ? start + tile : n;
        f16 part[2 * HIGH] = {{0}};
        for (int64_t i = start; i < end; i++) {
            f16 row;
            memcpy(&row, x + i * BROAD, sizeof row);
#pragma GCC unroll 6
            for (int o = 0; o < HIGH; o++) part[o] += g[i * HIGH + o] * row;
#pragma GCC unroll 6
            for (int o = 0; o < HIGH; o++) part[HIGH + o] += h[i * HIGH + o] * row;
        }
#pragma GCC unroll 12
        for (int o = 0; o < 2 * HIGH; o++)
#pragma GCC unroll 4
            for (int k = 0; k < BROAD / 4; k++) {
                f4 v;
                memcpy(&v, (const char *)&part[o] + 16 * k, sizeof v);
                sum[o][k] += WIDE(v);
            }
    }
}
#endif

TARGET static void NAME(outer)(const float *g, int64_t g_stride, int64_t out, const rows_t *x, const double *weights,
                               int64_t tile, float *space, float *total, double *bias) {
    int64_t n = x->n, high = (out + HIGH - 1) / HIGH;
    float *row = space + n * high * HIGH, *panels = row + high * HIGH;
    memset(row, 0, 4 * high * HIGH);
    for (int64_t o = 0; o < out; o++) bias[o] = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const float *from = g + i * g_stride;
        double w = weights[i];
        if (w == 0.0) memset(row, 0, 4 * out);
        for (int64_t o = 0; o < out && w != 0.0; o++) {
            double v = w * from[o];
            row[o] = (float)v;
            bias[o] += v;
        }
        for (int64_t b = 0; b < high; b++) memcpy(space + (b * n + i) * HIGH, row + b * HIGH, 4 * HIGH);
    }
    for (int64_t start = 0; start < x->d; start += PANELS * BROAD) {
        int64_t count = (x->d - start + BROAD - 1) / BROAD;
        if (count > PANELS) count = PANELS;
        for (int64_t p = 0; p < count; p++) {
            int64_t at = start + p * BROAD, width = x->d - at < BROAD ? x->d - at : BROAD;
            for (int64_t i = 0; i < n; i++) {
                float *to = panels + (p * n + i) * BROAD;
                const float *from = row_at(x, i) + at;
                if (weights[i] == 0.0 || width < BROAD) memset(to, 0, 4 * BROAD);
                if (weights[i] == 0.0) continue;
                if (width == BROAD)
                    memcpy(to, from, 4 * BROAD);
                else
                    memcpy(to, from, 4 * width);
            }
        }
        for (int64_t b = 0, more = 1; b < high; b += more)
            for (int64_t p = 0; p < count; p++) {
                int64_t at = start + p * BROAD, width = x->d - at < BROAD ? x->d - at : BROAD;
                d4 sum[2 * HIGH][BROAD / 4] = {{{0}}};
                const float *left = space + b * n * HIGH, *right = panels + p * n * BROAD;
                more = 1;
#ifdef LONGER
                if (LONGER && b + 1 < high) {
                    more = 2;
                    NAME(longer)(left, right, n, tile, sum);
                } else
#endif
                    NAME(products)(left, right, n, tile, sum);
                int64_t most = out - b * HIGH < more * HIGH ? out - b * HIGH : more * HIGH;
                for (int64_t o = 0; o < most; o++) {
                    float *to = total + (b * HIGH + o) * x->d + at;
                    f4 found[BROAD / 4];
                    for (int k = 0; k < BROAD / 4; k++) found[k] = NARROW(sum[o][k]);
                    if (width == BROAD)
                        memcpy(to, found, sizeof found); /* of known size, which is faster */
                    else
                        memcpy(to, found, 4 * width);
                }
            }
    }
}

/* ---- records of linear models: each row is read once for its scores and for what it adds ---- */

/* As `curved`, of a loss whose slope in target * score is a line of this gain between two bounds; columns: weight,
   target, where the line is 0, least and largest slope. */
TARGET static inline void NAME(bent)(d4 score, const double *columns, double gain, d4 *loss, d4 *slope, d4 *bend) {
    d4 weight = NAME(load4)(columns), target = NAME(load4)(columns + BATCH), zero = NAME(load4)(columns + 2 * BATCH);
    d4 low = NAME(load4)(columns + 3 * BATCH), high = NAME(load4)(columns + 4 * BATCH);
    d4 place = (target * score - zero) * gain + (score - score); /* NaN, which no bound cuts */
    d4 cut = NAME(where)(place > high, high, NAME(where)(place < low, low, place));
    *loss = weight * (cut * (place - cut * 0.5)) / gain;
    *slope = weight * target * cut;
    *bend = (d4)((i4)(weight * target * target * gain) & (place <= high) & (place >= low));
}

/* Places of GROUP images from i on, of which `count` are wanted: those that are kept, or computed into p. */
TARGET static inline const double *NAME(read)(const table_t *x, const double *kept, int64_t i, int64_t count,
                                              int64_t n, const double *shares, const double *weights, int64_t padded,
                                              double *p) {
    if (kept) return kept + i * padded;
    NAME(counted)(x, i, count, shares + i, shares + n + i, weights, p, padded);
    return p;
}

/* Products of GROUP images with a point. */
TARGET static inline d4 NAME(times)(const double *p, const double *point, int64_t padded) {
    d4 a = {0}, b = {0}, c = {0}, e = {0};
    for (int64_t j = 0; j < padded; j += 4) {
        d4 w = NAME(load4)(point + j);
        a += NAME(load4)(p + j) * w, b += NAME(load4)(p + padded + j) * w;
        c += NAME(load4)(p + 2 * padded + j) * w, e += NAME(load4)(p + 3 * padded + j) * w;
    }
    return (d4){(a[0] + a[1]) + (a[2] + a[3]), (b[0] + b[1]) + (b[2] + b[3]), (c[0] + c[1]) + (c[2] + c[3]),
                (e[0] + e[1]) + (e[2] + e[3])};
}

/* sums += slopes times GROUP images. */
TARGET static inline void NAME(plus)(const double *p, const double *slopes, int64_t padded, double *sums) {
    d4 by[GROUP];
    for (int k = 0; k < GROUP; k++) by[k] = (d4){slopes[k], slopes[k], slopes[k], slopes[k]};
    for (int64_t j = 0; j < padded; j += 4) {
        d4 sum = NAME(load4)(sums + j);
        for (int k = 0; k < GROUP; k++) sum += NAME(load4)(p + k * padded + j) * by[k];
        memcpy(sums + j, &sum, sizeof sum);
    }
}

/* Sums of the rows from `from` up to `end`, of n. */
TARGET static void NAME(scored)(const table_t *x, int64_t from, int64_t end, int64_t n, const double *shares,
                                const double *kept, const double *columns, int64_t kind, double gain,
                                const double *point, int64_t padded, double *scratch, double *sums, double *bends,
                                double *found) {
    d4 total = {0};
    const int64_t batch = padded > CACHED / BATCH ? GROUP : BATCH; /* images that stay in cache */
    for (int64_t start = from; start < end; start += batch) {
        int64_t count = end - start < batch ? end - start : batch;
        const double *p[BATCH / GROUP];
        double column[COLUMNS][BATCH] = {{0}}, scores[BATCH];
        for (int k = 0; k < (kind == FIXED ? 1 : COLUMNS); k++)
            memcpy(column[k], columns + k * n + start, 8 * count);
        for (int64_t r = 0; r < count; r += GROUP) {
            int64_t few = count - r < GROUP ? count - r : GROUP;
            p[r / GROUP] = NAME(read)(x, kept, start + r, few, n, shares, column[0] + r, padded, scratch + r * padded);
            d4 score = kind == FIXED ? NAME(load4)(column[0] + r) : NAME(times)(p[r / GROUP], point, padded);
            memcpy(scores + r, &score, sizeof score);
        }
        if (found) memcpy(found + start, scores, 8 * count);
        for (int64_t r = 0; kind != FIXED && r < count; r += GROUP) {
            d4 loss, slope, bend, score = NAME(load4)(scores + r);
            if (kind == CURVED)
                NAME(curved)(score, column[0] + r, &loss, &slope, &bend);
            else
                NAME(bent)(score, column[0] + r, gain, &loss, &slope, &bend);
            total += loss;
            memcpy(scores + r, &slope, sizeof slope); /* from here on */
            if (bends) memcpy(bends + start + r, &bend, 8 * (count - r < GROUP ? count - r : GROUP));
        }
        for (int64_t r = 0; r < count; r += GROUP) NAME(plus)(p[r / GROUP], scores + r, padded, sums);
    }
    sums[padded] = (total[0] + total[1]) + (total[2] + total[3]);
}

/* Scores of four records into chances, and chances into slopes, of length at most `limit`, weighted: returns losses. */
TARGET static inline d4 NAME(softmax)(double *scores, int64_t classes, d4 weight, d4 label, d4 limit) {
    const d4 zero = {0}, far = {700.0, 700.0, 700.0, 700.0}, one = {1.0, 1.0, 1.0, 1.0};
    d4 most = NAME(load4)(scores), sum = {0}, own = {0}, squares = {0};
    for (int64_t k = 1; k < classes; k++) {
        d4 score = NAME(load4)(scores + GROUP * k);
        most = NAME(where)(score > most, score, most);
    }
    for (int64_t k = 0; k < classes; k++) {
        d4 score = NAME(load4)(scores + GROUP * k), gap = most - score;
        d4 e = NAME(exp_minus)(NAME(where)(gap < far, gap, far)) + (gap - gap); /* NaN for what is not finite */
        own = NAME(where)(label == (double)k + zero, gap, own);
        sum += e;
        memcpy(scores + GROUP * k, &e, sizeof e);
    }
    for (int64_t k = 0; k < classes; k++) {
        d4 slope = NAME(load4)(scores + GROUP * k) / sum - NAME(where)(label == (double)k + zero, one, zero);
        squares += slope * slope;
        memcpy(scores + GROUP * k, &slope, sizeof slope);
    }
    d4 length = ROOT(squares), by = weight * NAME(where)(length > limit, limit / length, one);
    for (int64_t k = 0; k < classes; k++) {
        d4 slope = NAME(load4)(scores + GROUP * k) * by;
        memcpy(scores + GROUP * k, &slope, sizeof slope);
    }
    return weight * (own - NAME(log4)(1.0 / sum));
}

TARGET static void NAME(classes)(const table_t *x, int64_t from, int64_t end, int64_t n, const double *shares,
                                 const double *kept, const double *columns, const double *points, int64_t classes,
                                 int64_t padded, double *scratch, double *sums) {
    d4 total = {0};
    double *slopes = scratch + GROUP * padded;
    for (int64_t start = from; start < end; start += GROUP) {
        int64_t count = end - start < GROUP ? end - start : GROUP;
        double column[3][GROUP] = {{0}};
        for (int k = 0; k < 3; k++) memcpy(column[k], columns + k * n + start, 8 * count);
        const double *p = NAME(read)(x, kept, start, count, n, shares, column[0], padded, scratch);
        for (int64_t k = 0; k < classes; k++) {
            d4 score = NAME(times)(p, points + k * padded, padded);
            memcpy(slopes + GROUP * k, &score, sizeof score);
        }
        total += NAME(softmax)(slopes, classes, NAME(load4)(column[0]), NAME(load4)(column[1]), NAME(load4)(column[2]));
        for (int64_t k = 0; k < classes; k++) NAME(plus)(p, slopes + GROUP * k, padded, sums + k * padded);
    }
    sums[classes * padded] = (total[0] + total[1]) + (total[2] + total[3]);
}

#define TURN(v, n) v = v << n | v >> (32 - n)
#define QUARTER(a, b, c, d)                                                                                              \
    a += b, d ^= a, TURN(d, 16), c += d, b ^= c, TURN(b, 12), a += b, d ^= a, TURN(d, 8), c += d, b ^= c, TURN(b, 7)

/* A lane is a block; `blocks` of them are written. */
TARGET static void NAME(chacha)(const uint32_t *start, int64_t blocks, char *out) {
    u8 x[16], first[16];
    uint32_t words[LANES][16];
    for (int k = 0; k < 16; k++) first[k] = start[k] + (u8){0};
    first[12] += (u8){0, 1, 2, 3, 4, 5, 6, 7};
    memcpy(x, first, sizeof x);
    for (int round = 0; round < 10; round++) {
        QUARTER(x[0], x[4], x[8], x[12]);
        QUARTER(x[1], x[5], x[9], x[13]);
        QUARTER(x[2], x[6], x[10], x[14]);
        QUARTER(x[3], x[7], x[11], x[15]);
        QUARTER(x[0], x[5], x[10], x[15]);
        QUARTER(x[1], x[6], x[11], x[12]);
        QUARTER(x[2], x[7], x[8], x[13]);
        QUARTER(x[3], x[4], x[9], x[14]);
    }
    for (int k = 0; k < 16; k++)
        for (int lane = 0; lane < LANES; lane++) words[lane][k] = (x[k] + first[k])[lane];
    memcpy(out, words, 64 * blocks);
}
#undef TURN
#undef QUARTER

TARGET static double NAME(below)(const double *values, const double *weights, int64_t n, double most) {
    const d4 limit = {most, most, most, most};
    d4 a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        a += (d4)((i4)NAME(load4)(weights + i) & (NAME(load4)(values + i) <= limit));
        b += (d4)((i4)NAME(load4)(weights + i + 4) & (NAME(load4)(values + i + 4) <= limit));
    }
    a += b;
    for (; i < n; i++)
        if (values[i] <= most) a[0] += weights[i];
    return (a[0] + a[1]) + (a[2] + a[3]);
}

#endif
