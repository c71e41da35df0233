// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// otherSchema is the number of the last change of the form of documents and the record that is no key of the
// policy. The next one is Schema() + 1, as for a key.
//
// 3 to 5 and 8 are fields of the record. With 9 a chain with a network exempts multicast: a version that
// does not would revert these rules.
const otherSchema = 9

// Schema is the version of the form of documents and the record, with which each file begins. Each new key
// raises it (policy.Keys): a version that does not know the key can tell the file from a damaged one, and
// leaves it as it is. Files of lower schemas are read in today's form.
func Schema() int { return max(otherSchema, policy.Schema()) }

// document is a source with its policy as it is stored. It has no time, so that equal policies make
// equal documents; the file's mtime tells its age.
type document struct {
	Schema int `json:"schema"`
	policy.Source
}

type recordDocument struct {
	Schema int `json:"schema"`
	Record
}

// podsDocument is the exempt pods of a record, which plugin and reconciler read, verify and write with the
// rules. They are a file of their own, as pods come and go more often than policies. It is not synced to the
// disk: it is valid in one boot.
type podsDocument struct {
	Schema int    `json:"schema"`
	Boot   string `json:"boot,omitempty"`
	ExemptPods
}

// ExemptPods are the pods of namespaces, by address. Namespaces are those of the policies, sorted.
type ExemptPods struct {
	Namespaces []string    `json:"namespaces,omitempty"`
	Pods       []ExemptPod `json:"pods,omitempty"`
}

// Record lists the chains that ip-masq owns in the kernel, with their backends, and the resets of connections
// that are due. It is valid in one boot.
type Record struct {
	Boot   string       `json:"boot,omitempty"`
	Chains []OwnedChain `json:"chains,omitempty"` // in the writer's order

	NoRandomFully bool `json:"noRandomFully,omitempty"` // the host's iptables-legacy has no --random-fully

	Outputs []Outputs      `json:"outputs,omitzero"` // also of earlier boots
	Former  []ChainAddress `json:"former,omitzero"`  // that were in force in this boot, and are on the node

	ExemptPods `json:"-"` // in a file of their own

	Resets []Reset `json:"resets,omitzero"` // in the order of At
	// LastReset is when a walk for untranslated connections, or one that failed, began last, as At.
	LastReset int64     `json:"lastReset,omitempty"`
	Deleted   []Deleted `json:"deleted,omitzero"` // by all walks; sorted, of chains that are owned
}

// Outputs are the addresses that pods leave with by the policy of a chain, with the list that they were
// chosen for: while it is the same they stay.
type Outputs struct {
	Chain     string                 `json:"chain"`
	Items     policy.AddressItems    `json:"items"`
	Addresses []policy.OutputAddress `json:"addresses"`
}

// ExemptPod is an address that is an exempt source because of its pod's namespace.
type ExemptPod struct {
	policy.ExemptPod
	Attachment
	At     int64 `json:"at"`               // as Pod.At
	Cached bool  `json:"cached,omitempty"` // as Pod.Cached
}

// sameAfterCrash reports whether two records are equal but for what a new boot drops.
func (r Record) sameAfterCrash(s Record) bool {
	return reflect.DeepEqual(r.afterCrash(), s.afterCrash())
}

func (r Record) afterCrash() Record {
	r.ExemptPods = ExemptPods{}
	r.Resets = nil
	r.LastReset = 0
	r.Deleted = nil
	return r
}

// Addresses returns the addresses with their namespaces.
func (x ExemptPods) Addresses() []policy.ExemptPod {
	var pods []policy.ExemptPod
	for _, p := range x.Pods {
		pods = append(pods, p.ExemptPod)
	}
	return pods
}

// Deleted is how many connections walks through the conntrack table deleted because of the policy of a chain.
type Deleted struct {
	policy.ChainFamily
	Connections uint64 `json:"connections"`
}

// ChainAddress is an address that pods leave with by the policy of a chain.
type ChainAddress struct {
	Chain   string     `json:"chain"`
	Address netip.Addr `json:"address"`
}

// Compare orders by chain and address.
func (a ChainAddress) Compare(b ChainAddress) int {
	return cmp.Or(strings.Compare(a.Chain, b.Chain), a.Address.Compare(b.Address))
}

// Reset is a walk through the conntrack table that deletes stale connections. It has one of Before, Left and
// Passed. If it has none of them, it deletes the connections that should have been masqueraded and were not.
type Reset struct {
	At int64 `json:"at"` // when it was recorded, CLOCK_BOOTTIME in nanoseconds; identifies it

	// Before has the sources that were in force until then: connections are deleted whose verdict has changed
	// since, and no others.
	Before []policy.Source    `json:"before,omitzero"`
	Pods   []policy.ExemptPod `json:"pods,omitzero"` // that were exempt then

	// Left are addresses that left the node: the connections that chains translated to them are deleted, and
	// no others.
	Left []ChainAddress `json:"left,omitzero"`

	// Passed are addresses that passed to pods with another verdict: the connections of their former pods are
	// deleted, and no others.
	Passed []netip.Addr `json:"passed,omitzero"`
}

// FindsUntranslated reports whether the reset is for connections that should have been masqueraded and were
// not.
func (r Reset) FindsUntranslated() bool { return r.Before == nil && r.Left == nil && r.Passed == nil }

// OwnedChain is a chain of one family that ip-masq created, or was about to create.
type OwnedChain struct {
	Chain         string         `json:"chain"`
	Family        policy.Family  `json:"family"`
	Backend       policy.Backend `json:"backend"` // iptables or nftables
	Variant       string         `json:"variant,omitempty"`
	RemovalFailed bool           `json:"stuck,omitempty"` // removing the stale chain failed
}

// validate checks a record. Its chains will be removed some day, so a chain that cannot be ip-masq's
// must never be in it.
func (r Record) validate() error {
	for i, c := range r.Chains {
		if err := c.validate(); err != nil {
			return fmt.Errorf("chains[%d]: %w", i, err)
		}
	}
	for i, reset := range r.Resets {
		for _, s := range reset.Before {
			if err := s.Validate(policy.MaxCIDRLimit); err != nil {
				return fmt.Errorf("resets[%d].before: %w", i, err)
			}
		}
	}
	return nil
}

func (c OwnedChain) validate() error {
	if err := policy.ValidateChainName(c.Chain); err != nil {
		return fmt.Errorf("chain %s %w", policy.Quote(c.Chain), err)
	}
	if !slices.Contains(policy.Families(), c.Family) {
		return fmt.Errorf("%s is not a family", policy.Quote(string(c.Family)))
	}
	isNFTables := c.Backend == policy.NFTables && c.Variant == ""
	isIPTables := c.Backend == policy.IPTables && (c.Variant == "nft" || c.Variant == "legacy")
	if !isNFTables && !isIPTables {
		return fmt.Errorf("backend %s with variant %s is not one that rules can be in",
			policy.Quote(string(c.Backend)), policy.Quote(c.Variant))
	}
	return nil
}

func nameOf(src policy.SourceID) string {
	return hashName("source", string(src.Kind), src.Name) + documentSuffix
}

func (d document) validate() error { return d.Validate(policy.MaxCIDRLimit) }

func (d podsDocument) validate() error {
	for i, p := range d.Pods {
		if !p.Address.IsValid() {
			return fmt.Errorf("pods[%d]: the address is missing", i)
		}
	}
	return nil
}

func decodeSource(data []byte, name string) (policy.Source, error) {
	d, err := decode[document](data)
	if err == nil && nameOf(d.ID) != name {
		err = fmt.Errorf("the file name is not that of %s", d.ID)
	}
	return d.Source, err
}

// encode validates a document and encodes it.
func encode(d interface{ validate() error }) ([]byte, error) {
	if err := d.validate(); err != nil {
		return nil, err
	}
	data, err := json.Marshal(d)
	if len(data) > maxDocument {
		return nil, fmt.Errorf("it has %d bytes, more than the limit of %d", len(data), maxDocument)
	}
	return data, err
}

// decode decodes a document and validates it. The error is an ErrNewer if a newer version wrote it.
func decode[D interface{ validate() error }](data []byte) (d D, err error) {
	schema := schemaOf(data)
	switch {
	case schema > otherSchema && schema > Schema(): // Schema builds the table of keys, which takes time
		return d, newerError(schema)
	case schema < 1:
		return d, fmt.Errorf(`it does not begin with {"schema":%d, as ip-masq writes it`, Schema())
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&d); err != nil {
		return d, err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return d, errors.New("text follows the end of the document")
	}
	return d, d.validate()
}

// newerError returns why a document of a greater schema is neither read nor changed.
func newerError(schema int) error {
	return fmt.Errorf("%w: it has schema %d and this program knows schemas up to %d; "+
		"install the newer version again", ErrNewer, schema, Schema())
}

// schemaOf returns the schema of a document, which every version writes at its beginning. It is 0 if
// there is none, and math.MaxInt if it is greater than that. The rest may have any form.
func schemaOf(data []byte) int {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	start, _ := d.Token()
	key, _ := d.Token()
	value, _ := d.Token()
	number, isNumber := value.(json.Number)
	if start != json.Delim('{') || key != "schema" || !isNumber {
		return 0
	}
	schema, _ := strconv.Atoi(number.String())
	return schema
}
