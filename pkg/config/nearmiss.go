// SPDX-License-Identifier: Apache-2.0

package config

import "strings"

// nearest returns the name of the key that was most likely meant by an unknown
// one, or "": one that differs in letter case, in '-' and '_', or in a quarter
// of its letters at most.
func Nearest(unknown string, keys []Key) string {
	const longest = 64 // no key is near to anything that long
	if len(unknown) > longest {
		return ""
	}
	bare := bareKey(unknown)
	best, bestDistance := "", longest
	for _, k := range keys {
		name := bareKey(k.Name)
		d := editDistance(bare, name)
		if d < bestDistance && d <= max(1, len(name)/4) {
			best, bestDistance = k.Name, d
		}
	}
	return best
}

func bareKey(s string) string {
	return strings.NewReplacer("-", "", "_", "").Replace(strings.ToLower(s))
}

// editDistance counts the letters to insert, delete or replace that make one
// text the other (Levenshtein).
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
