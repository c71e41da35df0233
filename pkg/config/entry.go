// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// PluginType is the "type" of our entries in conflists: the binary's name.
const PluginType = "ip-masq"

// Entry is what a conflist entry says.
type Entry struct {
	Network    string // the conf's name
	CNIVersion string // "" where the conf states none
	Policy     policy.SourcePolicy

	RequireAgentConfig bool
	CIDRLimit          int    // of this document; DefaultCIDRLimit where it states none
	DataDir            string // absolute and clean; DefaultDataDir where it states none
}

// ParseEntry reads a conflist entry as runtimes hand it to a plugin on its
// standard input: with the list's name and cniVersion in it, and with what else
// the CNI spec puts there (section "Plugin configuration objects").
//
// What is no JSON at all is an ErrNotJSON. Otherwise the error is a
// DocumentError with every mistake, and of the Entry the Network, where there
// is a usable one, and the CNIVersion are all that is set.
func ParseEntry(netconf []byte) (Entry, error) { return ReadNetconf(netconf).Entry() }

// ParseLenient finds what can be used of an entry that may be stale or bad: the
// network's name, "" where it has no usable one, and the dataDir,
// DefaultDataDir where it has none. It is for the verbs that must work whatever
// became of the configuration.
func ParseLenient(netconf []byte) (network, dataDir string) {
	e := ReadNetconf(netconf).Identity()
	return e.Network, e.DataDir
}

// identityKeys tells whose state an entry is about, where that is, and in which
// version of the protocol the runtime speaks.
func (e *Entry) identityKeys() []Key {
	return []Key{
		{"name", needed(networkName(&e.Network))},
		{"dataDir", text(DefaultDataDir, pathLike(DefaultDataDir), func(s string) { e.DataDir = s })},
		{"cniVersion", text("1.0.0", unjudged, func(s string) { e.CNIVersion = s })},
	}
}

// ownKeys are the keys of an entry that are not about policy.
func (e *Entry) ownKeys() []Key {
	keys := append(e.identityKeys(),
		Key{"requireAgentConfig", boolean(func(b bool) { e.RequireAgentConfig = b })},
		Key{"cidrLimit", count(&e.CIDRLimit, 1, policy.MaxCIDRLimit)})
	for _, name := range othersKeys() {
		keys = append(keys, Key{Name: name})
	}
	return keys
}

// othersKeys are the CNI protocol's own. dns, ipam and ipMasq are conventions,
// which say nothing to a chained plugin.
func othersKeys() []string {
	return []string{"type", "prevResult", "runtimeConfig", "capabilities", "args", "ipam", "dns", "ipMasq"}
}

// ValidatePolicy judges a statement once all of it is read. What follows from a
// mistake that was reported already is no news.
func (f *Document) ValidatePolicy(s policy.SourcePolicy, limit int) {
	if f.Flawed["enableIPv6"] {
		enabled := true
		s.EnableIPv6 = &enabled
	}
	if f.Flawed["cidrLimit"] {
		limit = math.MaxInt
	}
	for _, err := range joined(s.Validate(limit)) {
		var mistake *policy.FieldError
		if errors.As(err, &mistake) {
			f.noteAsWritten(*mistake)
		} else {
			f.Note(err)
		}
	}
}

// joined returns the errors that errors.Join made one of.
func joined(err error) []error {
	var many interface{ Unwrap() []error }
	if errors.As(err, &many) {
		return many.Unwrap()
	}
	if err != nil {
		return []error{err}
	}
	return nil
}

func (f *Document) noteAsWritten(mistake policy.FieldError) {
	e := f.asWritten(mistake)
	line := f.LineOf(e.Key, e.Index, f.Lines[e.Key].Line)
	e.Key = f.Table + e.Key
	f.NoteAt(line, e)
}

// asWritten gives a mistake the places that items have in the document: what was
// judged is without those that cannot be read or that come again.
func (f *Document) asWritten(e policy.FieldError) *policy.FieldError {
	if places := f.Indexes[e.Key]; e.Index >= 0 && e.Index < len(places) {
		e.Index = places[e.Index]
	}
	for key, places := range f.Indexes {
		before, rest, found := strings.Cut(e.Problem, key+"[")
		digits, after, closed := strings.Cut(rest, "]")
		at, err := strconv.Atoi(digits)
		// masqueradeCIDRs ends nonMasqueradeCIDRs in other letters, so no key ends another.
		if found && closed && err == nil && at >= 0 && at < len(places) {
			e.Problem = fmt.Sprintf("%s%s[%d]%s", before, key, places[at], after)
			break
		}
	}
	return &e
}
