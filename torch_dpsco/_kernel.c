/* The arithmetic of `torch_dpsco.native` on plain memory: no Python, no torch, no state, no memory of its own.

   Rows are float32, `stride` numbers apart; sums and norms are float64. Each row is read by code that sees no other row,
   so that a score, a slope, a norm, a weight are functions of the record alone. Bounds: docs/proofs/rounding.md and
   docs/proofs/noise.md. Compiled without fast-math; products may be fused with sums, as the proofs allow. */

#ifndef BODY

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif
#define LARGEST 0x1p64 /* norms from here on are infinite, as where squares overflow float32 */
#define GROUP 4        /* rows that are read together */
#define MOST 64        /* rows of a block */
#define CACHED 32768   /* numbers of a block, that stay in cache */
#define SOME 512       /* pairs of Gaussians, whose logarithms stay there */

typedef float f8 __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));
typedef int64_t i4 __attribute__((vector_size(32)));
typedef uint64_t u4 __attribute__((vector_size(32)));
typedef uint32_t v4 __attribute__((vector_size(16)));

enum { GIVEN, SIGN, LOGISTIC, SQUARE };

typedef struct {
    const float *rows;
    const int64_t *index; /* of the rows, or NULL for all in order */
    int64_t stride, n, d;
} rows_t;

static inline const float *row_at(const rows_t *x, int64_t i) {
    return x->rows + (x->index ? x->index[i] : i) * x->stride;
}

/* Derivative of the loss of a record in its score. SIGN takes the opposite of the label. */
static inline float slope_of(int64_t kind, float score, float target) {
    switch (kind) {
    case SIGN: return target / (1.0f + expf(-score * target));
    case LOGISTIC: return 1.0f / (1.0f + expf(-score)) - target;
    case SQUARE: return 2.0f * (score - target);
    default: return target; /* GIVEN */
    }
}

/* Factor of (x, 1): slope * factor clipped to [-limit, limit], over factor; 0 for a row that must not count. */
static inline double weight_of(float slope, double factor, double limit, double scale) {
    double length = (double)slope * factor;
    if (!(fabs(length) < INFINITY) || !(factor < LARGEST)) return 0.0;
    length = length > limit ? limit : length < -limit ? -limit : length;
    return length / factor * scale;
}

#define BODY
#define NAME(name) name##_plain
#define TARGET
#include "_kernel.c"
#undef NAME
#undef TARGET

#if defined(__x86_64__)
#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include "_kernel.c"
#undef NAME
#undef TARGET
#define CALL(name, ...) (has_avx2() ? name##_avx2(__VA_ARGS__) : name##_plain(__VA_ARGS__))
static int has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
#define CALL(name, ...) name##_plain(__VA_ARGS__)
#endif

/* By which `native` knows that it was compiled from this text. */
API int64_t dpsco_version(void) { return DPSCO_VERSION; }

/* out[i] = computed norm of row i. */
API void dpsco_norms(const float *rows, int64_t stride, int64_t n, int64_t d, double *out) {
    rows_t x = {rows, 0, stride, n, d};
    CALL(norms, &x, out);
}

/* out[j] += sum_i weights[i] rows[i][j]; rows of weight 0 are not read. */
API void dpsco_sum(const float *rows, int64_t stride, int64_t n, int64_t d, const double *weights, double *out) {
    rows_t x = {rows, 0, stride, n, d};
    CALL(weighted, &x, weights, out);
}

/* out[0..d] += sum_i w_i (x_i, 1): w_i the slope of row i, clipped to limit / factors[i] and times scale.

   The slope is that of a loss (kind) at the score x_i . weight + bias, or targets[i] itself (GIVEN). Targets and
   factors are taken at the place of the row. Returns how many of the n places are not in [0, records); if there are
   any, nothing is read. */
API int64_t dpsco_linear(const float *rows, int64_t stride, int64_t records, const int64_t *index, int64_t n, int64_t d,
                         const float *weight, float bias, int64_t kind, const float *targets, const double *factors,
                         double limit, double scale, double *out) {
    rows_t x = {rows, index, stride, n, d};
    int64_t outside = 0;
    for (int64_t i = 0; index && i < n; i++) outside += index[i] < 0 || index[i] >= records;
    if (!outside) CALL(linear, &x, weight, bias, kind, targets, factors, limit, scale, out);
    return outside;
}

/* values[i] = log V of words[i]; returns how many of them are outside of (low, high). */
API int64_t dpsco_logs(const char *words, int64_t n, double low, double high, double *values) {
    return CALL(logs, words, n, low, high, values);
}

/* out[0..n) = scale times Gaussians of the bits: for (n + 1)/2 pairs a word of 64 bits each, then an angle each, of 64
   bits (wide: numbers are float64) or 32 (float32). The cosines come first. Words are used by their logarithms, which
   may be given; returns how many of those that are not are outside of (low, high). */
API int64_t dpsco_gaussians(const char *bits, int64_t n, int64_t wide, double scale, double low, double high,
                            const double *given, void *out) {
    int64_t half = (n + 1) / 2, outside = 0;
    const char *angles = bits + 8 * half;
    for (int64_t i = 0; i < half; i += SOME) {
        int64_t first = half - i < SOME ? half - i : SOME, second = n - half - i < first ? n - half - i : first;
        double some[SOME];
        if (given)
            memcpy(some, given + i, 8 * first);
        else
            outside += CALL(logs, bits + 8 * i, first, low, high, some);
        if (wide)
            CALL(polar64, some, angles + 8 * i, first, scale, (double *)out + i, (double *)out + half + i, second);
        else
            CALL(polar32, some, angles + 4 * i, first, scale, (float *)out + i, (float *)out + half + i, second);
    }
    return outside;
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
    return __builtin_convertvector(v, d4);
}

TARGET static inline d4 NAME(load4)(const double *p) {
    d4 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* score[r] = rows r . weight, for GROUP rows; each by the same operations. */
TARGET static void NAME(scores)(const float *const p[GROUP], const float *weight, int64_t d, float score[GROUP]) {
    f8 a[GROUP] = {{0}}, b[GROUP] = {{0}};
    int64_t j = 0;
    for (; j + 16 <= d; j += 16) {
        f8 low = NAME(load8)(weight + j), high = NAME(load8)(weight + j + 8);
        for (int r = 0; r < GROUP; r++) {
            a[r] += NAME(load8)(p[r] + j) * low;
            b[r] += NAME(load8)(p[r] + j + 8) * high;
        }
    }
    for (int r = 0; r < GROUP; r++) {
        f8 sum = a[r] + b[r];
        float rest = 0.0f;
        for (int64_t k = j; k < d; k++) rest += p[r][k] * weight[k];
        score[r] = ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7])) + rest;
    }
}

/* out += sum_r weight[r] row r, for GROUP rows. */
TARGET static void NAME(add)(const float *const p[GROUP], const double weight[GROUP], int64_t d, double *out) {
    d4 w[GROUP];
    for (int r = 0; r < GROUP; r++) w[r] = (d4){weight[r], weight[r], weight[r], weight[r]};
    int64_t j = 0;
    for (; j + 8 <= d; j += 8) {
        d4 low = NAME(load4)(out + j), high = NAME(load4)(out + j + 4);
        for (int r = 0; r < GROUP; r++) {
            low += w[r] * NAME(wide4)(p[r] + j);
            high += w[r] * NAME(wide4)(p[r] + j + 4);
        }
        memcpy(out + j, &low, sizeof low);
        memcpy(out + j + 4, &high, sizeof high);
    }
    for (; j < d; j++)
        for (int r = 0; r < GROUP; r++) out[j] += weight[r] * p[r][j];
}

/* out += sum_i weights[i] row i over those of weight other than 0, so that nothing in the others counts. */
TARGET static void NAME(add_all)(const float *const *p, const double *weights, int64_t n, int64_t d, double *out) {
    const float *some[GROUP];
    double w[GROUP];
    int k = 0;
    for (int64_t i = 0; i < n; i++) {
        if (weights[i] == 0.0) continue;
        some[k] = p[i];
        w[k++] = weights[i];
        if (k == GROUP) NAME(add)(some, w, d, out), k = 0;
    }
    if (!k) return;
    for (int r = k; r < GROUP; r++) some[r] = some[0], w[r] = 0.0; /* finite, as it counts */
    NAME(add)(some, w, d, out);
}

TARGET static int64_t NAME(block)(int64_t d) {
    int64_t fitting = CACHED / (d > 0 ? d : 1) / GROUP * GROUP;
    return fitting > MOST ? MOST : fitting < GROUP ? GROUP : fitting;
}

TARGET static void NAME(weighted)(const rows_t *x, const double *weights, double *out) {
    const float *p[MOST];
    for (int64_t start = 0; start < x->n; start += MOST) {
        int64_t n = x->n - start < MOST ? x->n - start : MOST;
        for (int64_t i = 0; i < n; i++) p[i] = row_at(x, start + i);
        NAME(add_all)(p, weights + start, n, x->d, out);
    }
}

TARGET static void NAME(norms)(const rows_t *x, double *out) {
    for (int64_t i = 0; i < x->n; i++) {
        const float *p = row_at(x, i);
        d4 a = {0}, b = {0}, c = {0}, e = {0};
        double rest = 0.0;
        int64_t j = 0;
        for (; j + 16 <= x->d; j += 16) {
            d4 v0 = NAME(wide4)(p + j), v1 = NAME(wide4)(p + j + 4), v2 = NAME(wide4)(p + j + 8),
               v3 = NAME(wide4)(p + j + 12);
            a += v0 * v0, b += v1 * v1, c += v2 * v2, e += v3 * v3;
        }
        for (; j < x->d; j++) rest += (double)p[j] * p[j];
        d4 sum = (a + b) + (c + e);
        double length = sqrt((sum[0] + sum[1]) + (sum[2] + sum[3]) + rest);
        out[i] = length >= LARGEST ? INFINITY : length;
    }
}

TARGET static void NAME(linear)(const rows_t *x, const float *weight, float bias, int64_t kind, const float *targets,
                                const double *factors, double limit, double scale, double *out) {
    const float *p[MOST];
    double w[MOST];
    int64_t step = NAME(block)(x->d);
    for (int64_t start = 0; start < x->n; start += step) {
        int64_t n = x->n - start < step ? x->n - start : step;
        for (int64_t i = 0; i < n; i++) p[i] = row_at(x, start + i);
        for (int64_t i = 0; i < n; i += GROUP) {
            const float *some[GROUP];
            float score[GROUP] = {0.0f};
            for (int r = 0; r < GROUP; r++) some[r] = p[i + r < n ? i + r : i];
            if (kind != GIVEN) NAME(scores)(some, weight, x->d, score);
            for (int r = 0; r < GROUP && i + r < n; r++) {
                int64_t at = x->index ? x->index[start + i + r] : start + i + r;
                w[i + r] = weight_of(slope_of(kind, score[r] + bias, targets[at]), factors[at], limit, scale);
                out[x->d] += w[i + r];
            }
        }
        NAME(add_all)(p, w, n, x->d, out);
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
    double radius[4];
    for (int k = 0; k < 4; k++) radius[k] = sqrt(-2.0 * logs[k]) * scale;
    NAME(turn)(angles, x, y);
    *x *= NAME(load4)(radius);
    *y *= NAME(load4)(radius);
}

TARGET static void NAME(polar64)(const double *logs, const char *angles, int64_t n, double scale, double *first,
                                 double *second, int64_t n_second) {
    int64_t i = 0, rest = n % 4;
    d4 x, y;
    u4 j;
    for (; i < n - rest && i + 4 <= n_second; i += 4) {
        memcpy(&j, angles + 8 * i, sizeof j);
        NAME(pairs)(logs + i, j, scale, &x, &y);
        memcpy(first + i, &x, sizeof x);
        memcpy(second + i, &y, sizeof y);
    }
    for (; i < n; i++) {
        double last[4] = {logs[i]};
        uint64_t angle;
        memcpy(&angle, angles + 8 * i, sizeof angle);
        NAME(pairs)(last, (u4){angle}, scale, &x, &y);
        first[i] = x[0];
        if (i < n_second) second[i] = y[0];
    }
}

TARGET static void NAME(polar32)(const double *logs, const char *angles, int64_t n, double scale, float *first,
                                 float *second, int64_t n_second) {
    int64_t i = 0, rest = n % 4;
    d4 x, y;
    for (; i < n - rest && i + 4 <= n_second; i += 4) {
        v4 part;
        memcpy(&part, angles + 4 * i, sizeof part);
        NAME(pairs)(logs + i, __builtin_convertvector(part, u4) << 32, scale, &x, &y);
        f4 a = __builtin_convertvector(x, f4), b = __builtin_convertvector(y, f4);
        memcpy(first + i, &a, sizeof a);
        memcpy(second + i, &b, sizeof b);
    }
    for (; i < n; i++) {
        double last[4] = {logs[i]};
        uint32_t angle;
        memcpy(&angle, angles + 4 * i, sizeof angle);
        NAME(pairs)(last, (u4){(uint64_t)angle << 32}, scale, &x, &y);
        first[i] = (float)x[0];
        if (i < n_second) second[i] = (float)y[0];
    }
}

#endif
