// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// UnknownKeys tells what to write in place of the unknown keys of one document.
type UnknownKeys struct {
	keys []Key
	// object has the keys of the Kubernetes object that a document was pasted with. The first one says
	// what to do about all of them.
	object     []string
	objectSays string
	objectTold bool

	wrappers []string // unknown keys that hold known ones
}

// NewUnknownKeys returns the UnknownKeys of a document with these members, which may have these keys.
func NewUnknownKeys(members []Member, keys []Key) *UnknownKeys {
	u := &UnknownKeys{keys: keys}
	for _, m := range members {
		if !u.isKey(m.Key) && u.holdsKeys(m, 0) {
			u.wrappers = append(u.wrappers, m.Key)
		}
	}
	switch {
	case isList(members):
		u.object = []string{"apiVersion", "kind", "metadata", "items"}
		u.objectSays = "this is a list of objects; write only the text of the file in its ConfigMap, " +
			"without data and the name of the file"
	case isConfigMap(members) || slices.Contains(u.wrappers, "data"):
		u.object = []string{"apiVersion", "kind", "metadata", "data", "binaryData", "immutable"}
		u.objectSays = "this is a whole ConfigMap; write only the text of the file in it, " +
			"without data and the name of the file"
	}
	return u
}

// Remedy returns what to do about an unknown key, or "" if the remedy of an earlier key covers it.
func (u *UnknownKeys) Remedy(name string) string {
	isOfObject := slices.Contains(u.object, name)
	if isOfObject && u.objectTold {
		return ""
	}
	if isOfObject {
		u.objectTold = true
		return u.objectSays
	}
	table := name[:strings.LastIndexByte(name, '.')+1]
	if near := synonym(name, u.keys); near != "" {
		return "did you mean " + strings.TrimPrefix(near, table) + "?"
	}
	if slices.Contains(u.wrappers, name) {
		return "write the keys inside it one level up, without " + policy.Printable(name)
	}
	return "remove it"
}

func isList(members []Member) bool {
	var hasKind, hasItems bool
	for _, m := range members {
		value := string(m.Value)
		if m.Key == "kind" && (value == `"List"` || value == `"ConfigMapList"`) {
			hasKind = true
		}
		if m.Key == "items" && m.Err == nil && KindOf(m.Value) == List {
			hasItems = true
		}
	}
	return hasKind && hasItems
}

func isConfigMap(members []Member) bool {
	var hasData, hasHeader bool
	for _, m := range members {
		switch {
		case m.Key == "kind" && string(m.Value) == `"ConfigMap"`:
			return true
		case m.Key == "data" && m.Err == nil:
			hasData = KindOf(m.Value) == Object
		case m.Key == "apiVersion" || m.Key == "metadata":
			hasHeader = true
		}
	}
	return hasData && hasHeader
}

// isKey reports whether a document may have a key of this name, in any letter case.
func (u *UnknownKeys) isKey(name string) bool {
	for _, k := range u.keys {
		if strings.EqualFold(k.Name, name) {
			return true
		}
	}
	return false
}

// holdsKeys reports whether a value is an object with known keys, or text that has one with its colon, such
// as a file in a ConfigMap, under whatever name. It looks no deeper than the items of a List of ConfigMaps
// need: each level reads the whole value again, and a document can have very many levels.
func (u *UnknownKeys) holdsKeys(m Member, depth int) bool {
	const deepest = 4
	if m.Err != nil || depth > deepest {
		return false
	}
	switch KindOf(m.Value) {
	case Object:
		for _, inner := range membersOf(m.Value) {
			if u.tells(inner.Key) || u.holdsKeys(inner, depth+1) {
				return true
			}
		}
	case String:
		text, _ := stringValue(m.Value)
		return u.textHoldsKeys(text)
	}
	return false
}

// textHoldsKeys reports whether a line of YAML or JSON has a known key with its colon.
func (u *UnknownKeys) textHoldsKeys(text string) bool {
	for line := range strings.Lines(text) {
		for part := range strings.SplitSeq(line, ",") {
			name, _, hasColon := strings.Cut(part, ":")
			if hasColon && u.tells(strings.Trim(name, " \t{\"'")) {
				return true
			}
		}
	}
	return false
}

// tells reports whether a name is that of a key, and one by which a wrapped document is known: not a short
// word, nor a key of the CNI protocol.
func (u *UnknownKeys) tells(name string) bool {
	const least = len("backend")
	for _, k := range u.keys {
		known := k.Name[strings.LastIndexByte(k.Name, '.')+1:]
		isOfProtocol := k.field == nil
		isTable := k.Kind == Object
		isShort := len(known) < least
		if isOfProtocol || isTable || isShort {
			continue
		}
		if strings.EqualFold(known, name) {
			return true
		}
	}
	return false
}

// synonym returns the key that means the same as an unknown one, or "".
func synonym(unknown string, keys []Key) string {
	table, name := "", unknown
	if dot := strings.LastIndexByte(unknown, '.'); dot >= 0 {
		table, name = unknown[:dot+1], unknown[dot+1:]
	}
	ours := nameOfOthers(fold(name))
	if ours == "" {
		return misspelled(unknown, keys)
	}
	for _, k := range keys {
		isInTable := table == "" && strings.HasSuffix(k.Name, "."+ours)
		if k.Name == table+ours || isInTable {
			return k.Name
		}
	}
	return misspelled(unknown, keys)
}

// nameOfOthers returns the key with the meaning of a key that a fork of the agents or another project has, or
// "". The name is folded.
func nameOfOthers(name string) string {
	switch name {
	case "nonmasqueradesrccidrs", "nonmasqsrccidrs": // TKE's ip-masq-agent
		return "nonMasqueradeSourceCIDRs"
	case "forcemasqueradecidrs", "masqcidrs":
		return "masqueradeCIDRs"
	case "nonmasqcidrs",
		"excludesnatcidrs", "awsvpck8scniexcludesnatcidrs", // amazon-vpc-cni-k8s
		"ipv4nativeroutingcidr", "ipv6nativeroutingcidr": // Cilium
		return "nonMasqueradeCIDRs"
	case "masqrandomfully", "snatfullyrandomports": // a fork of ip-masq-agent, Antrea
		return "randomFully"
	case "natportrange": // Calico
		return "toPorts"
	case "outputaddressipv6": // a fork of ip-masq-agent
		return "outputAddresses"
	case "egressmasqueradeinterfaces", "iptablesnatoutgoinginterfacefilter": // Cilium, Calico
		return "outputInterfaces"
	case "masqlinklocalipv4":
		return "masqLinkLocal"
	case "ipmasqbackend": // bridge and ptp
		return "backend"
	}
	return ""
}

// misspelled returns the key that differs from an unknown one by a slip of the pen, or "". Neither a word
// more or less is one, nor another digit or a negation: such a key may mean something else, or the opposite.
// If two keys are as near, none is meant.
func misspelled(unknown string, keys []Key) string {
	var nearest []string // keys with the fewest slips
	fewest := 0
	written := fold(unknown)
	for _, k := range keys {
		name := fold(k.Name)
		hasOtherDigits := digits(written) != "" && digits(written) != digits(name)
		isOpposite := isNegated(written) != isNegated(name)
		if hasOtherDigits || isOpposite {
			continue
		}
		n := slips(written, name)
		if n > slipsAllowed(name) {
			continue
		}
		if len(nearest) == 0 || n < fewest {
			nearest = nil
			fewest = n
		}
		if n == fewest {
			nearest = append(nearest, k.Name)
		}
	}
	if len(nearest) != 1 {
		return ""
	}
	return nearest[0]
}

// slipsAllowed is less than the letters of a word that changes the meaning, such as in nodeCIDRs for
// podCIDRs.
func slipsAllowed(key string) int {
	switch {
	case len(key) < 4:
		return 0
	case len(key) < 12:
		return 1
	}
	return 2
}

// fold returns a name without letter case, '-' and '_'.
func fold(name string) string {
	return strings.NewReplacer("-", "", "_", "").Replace(strings.ToLower(name))
}

func digits(name string) string {
	isNoDigit := func(r rune) bool { return r < '0' || r > '9' }
	return strings.Join(strings.FieldsFunc(name, isNoDigit), ",")
}

// isNegated reports whether a folded name begins with a negation.
func isNegated(name string) bool {
	name = name[strings.LastIndexByte(name, '.')+1:]
	for _, prefix := range []string{"no", "un", "dis", "dont", "exclude"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// slips returns how many letters were left out, added, replaced, or changed places with the next one: the
// optimal string alignment distance. Names whose lengths differ by more than two are not compared.
func slips(a, b string) int {
	const many = 3
	if len(a)-len(b) >= many || len(b)-len(a) >= many {
		return many
	}
	before, last := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			replaced := last[j-1]
			if a[i-1] != b[j-1] {
				replaced++
			}
			row[j] = min(replaced, last[j]+1, row[j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}
