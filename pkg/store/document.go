// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strconv"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Schema is the version of the form of documents and the record. Files with a greater one are left as
// they are.
const Schema = 2

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

// Record lists what ip-masq owns in the kernel, with the backend of each chain. It is valid in one boot.
type Record struct {
	Boot   string       `json:"boot,omitempty"`
	Chains []OwnedChain `json:"chains,omitempty"` // in the writer's order
}

// OwnedChain is a chain of one family that ip-masq created, or was about to create.
type OwnedChain struct {
	Chain      string         `json:"chain"`
	Family     policy.Family  `json:"family"`
	Backend    policy.Backend `json:"backend"` // iptables or nftables
	Variant    string         `json:"variant,omitempty"`
	PlainPorts bool           `json:"plainPorts,omitempty"` // source ports cannot be fully random
	Stuck      bool           `json:"stuck,omitempty"`      // removing the stale chain failed
}

// Equal reports whether both list the same in the same order.
func (r Record) Equal(s Record) bool { return r.Boot == s.Boot && slices.Equal(r.Chains, s.Chains) }

// validate checks a record. Its chains will be removed some day, so a chain that cannot be ip-masq's
// must never be in it.
func (r Record) validate() error {
	for i, c := range r.Chains {
		if err := policy.ValidateChainName(c.Chain); err != nil {
			return fmt.Errorf("chains[%d]: chain %s %w", i, policy.Quote(c.Chain), err)
		}
		if !slices.Contains(policy.Families(), c.Family) {
			return fmt.Errorf("chains[%d]: %s is not a family", i, policy.Quote(string(c.Family)))
		}
		nft := c.Backend == policy.NFTables && c.Variant == ""
		if ipt := c.Backend == policy.IPTables && (c.Variant == "nft" || c.Variant == "legacy"); !nft && !ipt {
			return fmt.Errorf("chains[%d]: backend %s with variant %s is not one that rules can be in",
				i, policy.Quote(string(c.Backend)), policy.Quote(c.Variant))
		}
	}
	return nil
}

// nameOf returns the file name of a source's document.
func nameOf(src policy.SourceID) string {
	return hashName("source", string(src.Kind), src.Name) + documentSuffix
}

// encodeContribution encodes the document of a source, if decoding it returns the same. Prefixes may be many,
// and valid ones do: only the rest is decoded again.
func encodeContribution(s policy.Source) ([]byte, error) {
	data, err := json.Marshal(document{Schema, s})
	if err != nil {
		return nil, err
	}
	if len(data) > maxDocument {
		return nil, fmt.Errorf("it has %d bytes, and at most %d are possible", len(data), maxDocument)
	}
	if err := validate(s); err != nil {
		return nil, err
	}
	s.Policy.NonMasqueradeCIDRs, s.Policy.MasqueradeCIDRs = nil, nil
	s.Policy.SourceCIDRs, s.Policy.NonMasqueradeSourceCIDRs = nil, nil
	rest, err := json.Marshal(document{Schema, s})
	if err != nil {
		return nil, err
	}
	again, err := decodeContribution(rest, nameOf(s.ID))
	if err == nil && !reflect.DeepEqual(s, again) {
		err = errors.New("it does not read back as it was written")
	}
	return data, err
}

// decodeContribution decodes the document in the named file. The error is an ErrNewer if a newer
// version wrote it.
func decodeContribution(data []byte, name string) (policy.Source, error) {
	var d document
	err := decode(data, &d, &d.Schema)
	if err == nil {
		err = validate(d.Source)
	}
	if err == nil && nameOf(d.ID) != name {
		err = fmt.Errorf("the file name is not that of %s", d.ID)
	}
	if err != nil {
		return policy.Source{}, err
	}
	return d.Source, nil
}

func encodeRecord(r Record) ([]byte, error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	data, err := json.Marshal(recordDocument{Schema, r})
	if err != nil {
		return nil, err
	}
	again, err := decodeRecord(data)
	if err == nil && !again.Equal(r) {
		err = errors.New("it does not read back as it was written")
	}
	return data, err
}

func decodeRecord(data []byte) (Record, error) {
	var d recordDocument
	err := decode(data, &d, &d.Schema)
	if err == nil {
		err = d.validate()
	}
	if err != nil {
		return Record{}, err
	}
	return d.Record, nil
}

// decode decodes a document of this schema; schema is the field for it in into.
func decode(data []byte, into any, schema *int) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		if _, end := d.Token(); !errors.Is(end, io.EOF) {
			err = errors.New("something stands behind the end of the document")
		}
	}
	// ip-masq writes this beginning. In other documents the decoder may have taken another key for the
	// schema: it ignores case, and takes the last of several.
	if err == nil && *schema == Schema && bytes.HasPrefix(data, fmt.Appendf(nil, `{"schema":%d,`, Schema)) {
		return nil
	}
	switch stated, schemaErr := schemaOf(data); {
	case schemaErr != nil:
		return fmt.Errorf("find its schema: %w", schemaErr)
	case stated > Schema:
		return &newerError{stated}
	case stated < 1:
		return fmt.Errorf("it has schema %d, which never was", stated)
	case err == nil && stated != *schema:
		return fmt.Errorf("it states the schemas %d and %d", stated, *schema)
	}
	return err
}

// newerError is an ErrNewer with the schema of the document.
type newerError struct{ schema int }

func (e *newerError) Error() string {
	return fmt.Sprintf("%v: it has schema %d, and schemas up to %d are known here; install the newer version again",
		ErrNewer, e.schema, Schema)
}

func (e *newerError) Is(target error) bool { return target == ErrNewer }

// schemaOf returns the first "schema" of a JSON object. The other keys may have any value, and what
// follows need not be JSON.
func schemaOf(data []byte) (int, error) {
	if len(data) == 0 {
		return 0, errors.New("it is empty")
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	switch t, err := d.Token(); {
	case err != nil:
		return 0, fmt.Errorf("it is not JSON: %w", err)
	case t != json.Delim('{'):
		return 0, errors.New("it is not a JSON object")
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return 0, err
		}
		if key != "schema" {
			var value json.RawMessage
			if err := d.Decode(&value); err != nil {
				return 0, err
			}
			continue
		}
		value, err := d.Token()
		if err != nil {
			return 0, err
		}
		number, isNumber := value.(json.Number)
		if !isNumber {
			return 0, errors.New("it is not a number")
		}
		n, err := strconv.Atoi(number.String())
		if errors.Is(err, strconv.ErrRange) && n > 0 {
			return math.MaxInt, nil
		}
		return n, err
	}
	return 0, errors.New("it states none")
}

// validate checks what a document says by itself: its readers rely on it.
func validate(s policy.Source) error {
	switch id := s.ID; {
	case id.Kind != policy.Network && id.Kind != policy.AgentFiles:
		return fmt.Errorf("source.kind: %s is not a kind of source", policy.Quote(string(id.Kind)))
	case id.Kind == policy.Network && id.Name == "":
		return errors.New("source.name: is missing, and a network has one")
	case id.Kind == policy.AgentFiles && id.Name != "":
		return errors.New("source.name: the agent files have none")
	}
	return s.Validate(policy.MaxCIDRLimit)
}

// State is the content of the dataDir.
type State struct {
	Sources []policy.Source // sorted
	Record  Record          // zero if there is no usable one
	Newer   []Newer         // files that a newer version wrote, the record included
	Damaged []Damaged       // files that cannot be used, the record included
}

// Newer is a file that a newer version wrote. It is left untouched.
type Newer struct {
	File   string // its path
	Schema int
}

// Damaged is a file that cannot be used: torn, of another form, invalid or refused (ErrRefused).
type Damaged struct {
	File string // its path
	Err  error  // names the path, what is wrong and the remedy
}

// Find returns the source, or nil.
func (s State) Find(src policy.SourceID) *policy.Source {
	for i := range s.Sources {
		if s.Sources[i].ID == src {
			return &s.Sources[i]
		}
	}
	return nil
}

// Load reads and decodes all documents and the record. What is wrong with one of them is in the State.
func (d *Dir) Load() (State, error) {
	r, err := d.Read(policy.SourceID{})
	if err != nil {
		return State{}, err
	}
	return r.State(), nil
}

// State decodes what was read.
func (r *Reading) State() State {
	var s State
	for _, f := range r.documents {
		s.add(f)
	}
	if r.record != nil {
		s.add(*r.record)
	}
	slices.SortFunc(s.Sources, func(a, b policy.Source) int { return a.ID.Compare(b.ID) })
	return s
}

// damaged reports whether a document, or the record, cannot be used.
func (f *file) damaged() bool {
	var s State
	s.add(*f)
	return len(s.Damaged) > 0
}

// add decodes a file.
func (s *State) add(f file) {
	err := f.err
	if err == nil {
		if f.name == recordFile {
			s.Record, err = decodeRecord(f.data)
		} else {
			var c policy.Source
			if c, err = decodeContribution(f.data, f.name); err == nil {
				s.Sources = append(s.Sources, c)
			}
		}
		if err != nil && !errors.Is(err, ErrNewer) {
			err = fmt.Errorf("%s %s: %w; it is moved aside and made again from its source", readDocument, shown(f.path), bounded(err))
		}
	}
	var newer *newerError
	switch {
	case errors.As(err, &newer):
		s.Newer = append(s.Newer, Newer{f.path, newer.schema})
	case err != nil:
		s.Damaged = append(s.Damaged, Damaged{f.path, err})
	}
}
