// Trees grown best-first from suffix matches and recycled continuations together, and the calibration of what they
// claim (as growth.py and auto.py in workers/drafters, in the same order of operations: scores are the same to the last
// bit).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "drafting_suffix.h"
#include "drafting_table.h"

constexpr double MIN_SCORE = 0.0005;   // a row that is accepted less often than this is never worth proposing
constexpr double MIN_CLAIM = 0.005;    // smaller claims cost more time than they win
constexpr double MARGIN = 0.5;         // claims are looked at down to this part of what would do
constexpr double NEGLIGIBLE = 0.25;    // and their summands down to this part of the least claim of interest
constexpr double KEY_TRUST = 0.65;     // weight of a longer key against all shorter ones
constexpr double PRIOR_WEIGHT = 1.0;   // a claim is believed until so many expected hits
constexpr double MEMORY = 1000.0;      // expected hits after which old outcomes begin to fade
constexpr int MAX_MATCH = 16;          // tokens that are compared
constexpr int MAX_LENGTH = 8;          // longer matches are calibrated together
constexpr int MAX_CLAIMS = 16 + (CONTEXT + 1) * TOP_K;  // of both indices' places, and of the keys and frequent tokens

enum Source : int64_t { SUFFIX, RECYCLING };

// Claims of one kind: how many came true against how many were claimed to.
struct Bucket {
    Source source = SUFFIX;
    double hits = 0.0, expected = 0.0, scale = 1.0;

    void record(double claimed, bool hit) {
        expected += claimed;
        hits += hit;
        if (expected > MEMORY) expected /= 2, hits /= 2;
        scale = (hits + PRIOR_WEIGHT) / (expected + PRIOR_WEIGHT);
    }
};

// A possible next token, the probability that is claimed for it, and the bucket that calibrates the claim.
struct Claim {
    Token token;
    double claimed;
    Bucket* bucket;
};

// A place of a walk: what matches there and what is claimed are ranges in the walk's own lists.
struct Place {
    Context context;
    Token token;  // that led here
    int32_t first_match, end_match, first_claim, end_claim;
    int32_t first_child, next_sibling;  // places, -1 for none
};

// What was looked at from the end of one sample's tokens on; place 0 is that end.
struct Walk {
    std::vector<Place> places;
    std::vector<Match> matches;
    std::vector<Claim> claims;
    std::vector<std::shared_ptr<const Document>> held;  // they may be dropped from their index while the walk is kept
    int64_t end = -1;                                   // number of tokens before place 0; -1: nothing is kept

    void clear() { places.clear(), matches.clear(), claims.clear(), held.clear(), end = -1; }
};

// The nodes of a draft, as arrays that have room for them.
struct Nodes {
    int64_t *tokens, *parents, *sources;
    double* scores;
};

// Probabilities by token, in the order of their first mention.
class Shares {
  public:
    int count() const { return count_; }
    Token token(int i) const { return tokens_[i]; }
    double& share(int i) { return shares_[i]; }

    double& of(Token token) {
        const int i = find(token);
        if (i == count_) tokens_[count_] = token, shares_[count_++] = 0.0;
        return shares_[i];
    }

    int find(Token token) const {
        int i = 0;
        while (i < count_ && tokens_[i] != token) ++i;
        return i;
    }

  private:
    int count_ = 0;
    Token tokens_[MAX_CLAIMS];
    double shares_[MAX_CLAIMS];
};

// Both predictors walk together, so that either goes on where the other has led, and a token that both expect gets the
// probability of both. The longer the suffix match, the more weight it has.
class Blend {
  public:
    explicit Blend(size_t contexts) : table(contexts) {
        for (auto& kind : by_recycling_) {
            for (auto& buckets : kind) {
                for (Bucket& bucket : buckets) bucket.source = RECYCLING;
            }
        }
    }

    // Begin a walk whose matches are already there.
    void begin(Walk& walk, const Context& context, double least) {
        walk.places.push_back({context, NO_TOKEN, 0, static_cast<int32_t>(walk.matches.size()), 0, 0, -1, -1});
        claim(walk, 0, least);
    }

    // The place after one more token, looked up if it is not known.
    int child(Walk& walk, int parent, Token token, double least) {
        int last = -1;
        for (int child = walk.places[parent].first_child; child >= 0; child = walk.places[child].next_sibling) {
            if (walk.places[child].token == token) return child;
            last = child;
        }
        const Place from = walk.places[parent];
        const auto first = static_cast<int32_t>(walk.matches.size());
        for (int32_t i = from.first_match; i < from.end_match; ++i) {
            Match match = walk.matches[i];
            if (match.next() == token && match.advance()) walk.matches.push_back(match);
        }
        const auto end = static_cast<int32_t>(walk.matches.size());
        const int place = static_cast<int>(walk.places.size());
        walk.places.push_back({from.context.followed_by(token), token, first, end, 0, 0, -1, -1});
        (last < 0 ? walk.places[parent].first_child : walk.places[last].next_sibling) = place;
        claim(walk, place, least);
        return place;
    }

    // The `max_rows` best continuations of place 0 as a tree, best first, none that scores below `min_score`.
    int64_t grow(Walk& walk, int64_t max_rows, double min_score, const Nodes& nodes) {
        frontier_.clear(), place_of_.clear();
        int64_t count = 0, node = -1;
        double score = 1.0;
        int place = 0;
        while (count < max_rows) {
            const auto rows_left = static_cast<size_t>(max_rows - count);
            look_beyond(walk, place, node, score, min_score, rows_left);
            if (frontier_.empty()) break;
            const Frontier best = frontier_.back();
            frontier_.pop_back();
            node = count++, score = best.score;
            nodes.tokens[node] = best.token, nodes.parents[node] = best.parent;
            nodes.scores[node] = best.score, nodes.sources[node] = best.source;
            if (rows_left == 1) break;
            const double worst = frontier_.size() >= rows_left - 1 ? frontier_.front().score : min_score;
            const double least = std::max(worst / score * MARGIN, MIN_CLAIM);
            place = child(walk, best.parent >= 0 ? place_of_[best.parent] : 0, best.token, least);
            place_of_.push_back(place);
        }
        return count;
    }

    // Record for each emitted token which claims came true.
    void grade(Walk& walk, const Token* emitted, int64_t count, double least) {
        int place = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (i) place = child(walk, place, emitted[i - 1], least);
            for (int32_t c = walk.places[place].first_claim; c < walk.places[place].end_claim; ++c) {
                const Claim& claim = walk.claims[c];
                claim.bucket->record(claim.claimed, claim.token == emitted[i]);
            }
        }
    }

    ContinuationTable table;
    FrequentTokens frequent;

  private:
    struct Frontier {
        double score;
        int64_t parent;
        Token token;
        Source source;
    };

    using Buckets = Bucket[5];  // one for each quarter of the claimed probability, and one for a claim of exactly 1

    // Put the claims of a place to the frontier, which is sorted, the best last, and holds no more than may be taken.
    void look_beyond(const Walk& walk, int place, int64_t node, double score, double min_score, size_t rows_left) {
        double bound = frontier_.size() >= rows_left ? frontier_.front().score : 0.0;
        for (int32_t c = walk.places[place].first_claim; c < walk.places[place].end_claim; ++c) {
            const Claim& claim = walk.claims[c];
            const double probability = claim.claimed * claim.bucket->scale;
            const double child_score = probability < 1.0 ? score * probability : score;
            if (child_score < min_score || child_score <= bound) continue;
            auto at = frontier_.end();  // among equals the one that came first is better
            while (at != frontier_.begin() && (at - 1)->score >= child_score) --at;
            frontier_.insert(at, {child_score, node, claim.token, claim.bucket->source});
            if (frontier_.size() > rows_left) frontier_.erase(frontier_.begin());
            if (frontier_.size() >= rows_left) bound = frontier_.front().score;
        }
    }

    // What is claimed after a place at more than `least`: each token under the name of the predictor that contributes
    // more to its probability.
    void claim(Walk& walk, int place, double least) {
        Shares votes, recycled;
        int length = vote(walk, walk.places[place], votes);
        const double weight = length / (length + 4.0);
        const int key_length = recycle(walk.places[place].context, least * NEGLIGIBLE, 1.0 - weight, recycled);
        length = std::min(length, MAX_LENGTH);
        Buckets &by_suffix = by_suffix_[length][key_length], &by_recycling = by_recycling_[length][key_length];
        const auto first = static_cast<int32_t>(walk.claims.size());
        for (int i = 0; i < votes.count(); ++i) {
            const double suffix_part = weight * votes.share(i);
            const int same = recycled.find(votes.token(i));
            const double recycling_part = same < recycled.count() ? recycled.share(same) : 0.0;
            if (same < recycled.count()) recycled.share(same) = -1.0;  // it is claimed here
            const double claimed = suffix_part + recycling_part;
            if (claimed <= least) continue;
            Buckets& buckets = suffix_part > recycling_part ? by_suffix : by_recycling;
            walk.claims.push_back({votes.token(i), claimed, &buckets[static_cast<int>(claimed * 4)]});
        }
        for (int i = 0; i < recycled.count(); ++i) {
            const double claimed = recycled.share(i);
            if (claimed > least) {
                walk.claims.push_back({recycled.token(i), claimed, &by_recycling[static_cast<int>(claimed * 4)]});
            }
        }
        walk.places[place].first_claim = first;
        walk.places[place].end_claim = static_cast<int32_t>(walk.claims.size());
    }

    // Each match votes for the token that followed it, with a weight that doubles with every token of its length.
    // Returns the length of the longest match.
    static int vote(const Walk& walk, const Place& place, Shares& votes) {
        int longest = 0;
        double total = 0.0;
        for (int32_t i = place.first_match; i < place.end_match; ++i) {
            const Match& match = walk.matches[i];
            const double vote = std::ldexp(1.0, match.length);
            votes.of(match.next()) += vote;
            total += vote;
            longest = std::max(longest, match.length);
        }
        for (int i = 0; i < votes.count(); ++i) votes.share(i) /= total;
        return longest;
    }

    // Interpolated back-off over the known keys and the tokens' frequencies, all times `rest`; summands below `least`
    // are left out. Returns the length of the longest known key.
    int recycle(const Context& context, double least, double rest, Shares& shares) {
        int longest = 0;
        for (int length = context.length(); length > 0; --length) {
            const Candidates* known = table.find(context.last(length));
            if (!known) continue;
            const double weight = rest * KEY_TRUST;
            rest -= weight;
            if (!longest) longest = length;
            for (int i = 0; i < known->count; ++i) {
                const double summand = weight * known->probability[i];
                if (summand < least) break;
                shares.of(known->token[i]) += summand;
            }
        }
        for (const FrequentTokens::Frequent& one : frequent.top()) {
            const double summand = rest * one.probability;
            if (summand < least) break;
            shares.of(one.token) += summand;
        }
        return longest;
    }

    Buckets by_suffix_[MAX_LENGTH + 1][CONTEXT + 1], by_recycling_[MAX_LENGTH + 1][CONTEXT + 1];
    std::vector<Frontier> frontier_;
    std::vector<int> place_of_;  // by node
};
