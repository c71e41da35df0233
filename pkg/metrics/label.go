// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// maxLabel is the longest value of a label, in bytes.
	maxLabel = 63
	// maxNames is how many sources, and how many chains, have series of their
	// own; the rest share those of other.
	maxNames = 200
	other    = "other"
)

// label makes the value of a label of any text: printable ASCII, quoted where
// it was something else. What is too long ends in a piece of its hash, so that
// two texts which begin alike stay apart.
func label(s string) string {
	v := s
	if strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }) {
		v = strconv.QuoteToASCII(v)
	}
	if len(v) <= maxLabel {
		return v
	}
	sum := sha256.Sum256([]byte(s))
	end := "~" + hex.EncodeToString(sum[:4])
	return v[:maxLabel-len(end)] + end
}

// sourceLabel names a source: network/podnet, agent-files.
func sourceLabel(s policy.SourceID) string {
	if s.Kind == policy.Network {
		return string(policy.Network) + "/" + label(s.Name)
	}
	return string(s.Kind)
}

// names are those that have series of their own. The first to come get them.
type names map[string]bool

// admit returns the name under which to count what bears this one.
func (n *names) admit(name string) string {
	switch {
	case (*n)[name]:
	case len(*n) >= maxNames:
		return other
	case *n == nil:
		*n = names{name: true}
	default:
		(*n)[name] = true
	}
	return name
}
