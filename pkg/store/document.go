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
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// otherSchema is the number of the last change of the form of documents and the record that is no key of the
// policy. The next one is Schema() + 1, as for a key.
const otherSchema = 8

// Schema is the version of the form of documents and the record. Each new key raises it (policy.Keys): a
// version that does not know the key leaves the file as it is. Files of lower schemas are read in today's form.
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

// podsDocument is the exempt pods of a record, a file of their own as pods come and go more often than policies.
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

	Outputs []Outputs      `json:"outputs,omitzero"` // also of earlier boots
	Former  []ChainAddress `json:"former,omitzero"`  // that were in force in this boot, and are on the node

	ExemptPods `json:"-"` // in a file of their own

	Resets    []Reset   `json:"resets,omitzero"`     // in the order of At, MaxResets at most
	LastReset int64     `json:"lastReset,omitempty"` // when a walk for a reset without Before, or one that failed, began last, as At
	Deleted   []Deleted `json:"deleted,omitzero"`    // by all walks; sorted, of chains that are owned
}

// Outputs are the addresses that pods leave with by the policy of a chain, with the list that they were chosen
// for: while it is the same they stay.
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
	for _, of := range []*Record{&r, &s} {
		of.ExemptPods, of.Resets, of.LastReset, of.Deleted = ExemptPods{}, nil, 0, nil
	}
	return reflect.DeepEqual(r, s)
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

// MaxResets is the number of resets that a record can have: two changes of policies, and one reset of each other kind.
const MaxResets = 5

// Reset is a walk through the conntrack table that deletes stale connections.
type Reset struct {
	At int64 `json:"at"` // when it was recorded, CLOCK_BOOTTIME in nanoseconds; identifies it

	// Before has the sources that were in force until then: connections are deleted whose verdict has changed
	// since. If it is nil, those are deleted that should have been masqueraded and were not.
	Before []policy.Source    `json:"before,omitzero"`
	Pods   []policy.ExemptPod `json:"pods,omitzero"` // that were exempt then

	// Left are addresses that left the node: the connections that chains translated to them are deleted, and
	// no others.
	Left []ChainAddress `json:"left,omitzero"`

	// Passed are addresses that passed to pods with another verdict: the connections of their former pods are
	// deleted, and no others.
	Passed []netip.Addr `json:"passed,omitzero"`
}

// FindsUntranslated reports whether the reset is for connections that should have been masqueraded and were not.
func (r Reset) FindsUntranslated() bool { return r.Before == nil && r.Left == nil && r.Passed == nil }

// OwnedChain is a chain of one family that ip-masq created, or was about to create.
type OwnedChain struct {
	Chain   string         `json:"chain"`
	Family  policy.Family  `json:"family"`
	Backend policy.Backend `json:"backend"` // iptables or nftables
	Variant string         `json:"variant,omitempty"`
	Stuck   bool           `json:"stuck,omitempty"` // removing the stale chain failed
}

// validate checks a record. Its chains will be removed some day, so a chain that cannot be ip-masq's
// must never be in it.
func (r Record) validate() error {
	for i, c := range r.Chains {
		if err := c.validate(); err != nil {
			return fmt.Errorf("chains[%d]: %w", i, err)
		}
	}
	for i, o := range r.Outputs {
		for _, a := range o.Addresses {
			if !a.Address.IsValid() {
				return fmt.Errorf("outputs[%d]: an address is missing", i)
			}
		}
	}
	for i, a := range r.Former {
		if !a.Address.IsValid() {
			return fmt.Errorf("former[%d]: the address is missing", i)
		}
	}
	if len(r.Resets) > MaxResets {
		return fmt.Errorf("resets: has %d entries, more than the %d possible", len(r.Resets), MaxResets)
	}
	for i, reset := range r.Resets {
		for _, s := range reset.Before {
			if err := validate(s); err != nil {
				return fmt.Errorf("resets[%d].before: %w", i, err)
			}
		}
	}
	return nil
}

func (c OwnedChain) validate() error {
	nft := c.Backend == policy.NFTables && c.Variant == ""
	ipt := c.Backend == policy.IPTables && (c.Variant == "nft" || c.Variant == "legacy")
	if err := policy.ValidateChainName(c.Chain); err != nil {
		return fmt.Errorf("chain %s %w", policy.Quote(c.Chain), err)
	}
	if !slices.Contains(policy.Families(), c.Family) {
		return fmt.Errorf("%s is not a family", policy.Quote(string(c.Family)))
	}
	if !nft && !ipt {
		return fmt.Errorf("backend %s with variant %s is not one that rules can be in", policy.Quote(string(c.Backend)), policy.Quote(c.Variant))
	}
	return nil
}

// nameOf returns the file name of a source's document.
func nameOf(src policy.SourceID) string {
	return hashName("source", string(src.Kind), src.Name) + documentSuffix
}

func encodeSource(s policy.Source) ([]byte, error) {
	if err := validate(s); err != nil {
		return nil, err
	}
	return encode(document{Schema(), s})
}

// decodeSource decodes the document in the named file.
func decodeSource(data []byte, name string) (policy.Source, error) {
	var d document
	err := decode(data, &d, &d.Schema)
	if err == nil {
		err = validate(d.Source)
	}
	if err == nil && nameOf(d.ID) != name {
		err = fmt.Errorf("the file name is not that of %s", d.ID)
	}
	return d.Source, err
}

func encodeRecord(r Record) ([]byte, error) {
	if err := r.validate(); err != nil {
		return nil, err
	}
	return encode(recordDocument{Schema(), r})
}

func encode(document any) ([]byte, error) {
	data, err := json.Marshal(document)
	if len(data) > maxDocument {
		return nil, fmt.Errorf("it has %d bytes, more than the limit of %d", len(data), maxDocument)
	}
	return data, err
}

func decodeRecord(data []byte) (Record, error) {
	var d recordDocument
	err := decode(data, &d, &d.Schema)
	if err == nil {
		err = d.validate()
	}
	return d.Record, err
}

func encodePods(r Record) ([]byte, error) {
	return encode(podsDocument{Schema(), r.Boot, r.ExemptPods})
}

func decodePods(data []byte) (podsDocument, error) {
	var d podsDocument
	err := decode(data, &d, &d.Schema)
	for i, p := range d.Pods {
		if !p.Address.IsValid() {
			err = cmp.Or(err, fmt.Errorf("pods[%d]: the address is missing", i))
		}
	}
	return d, err
}

// decode decodes a document, which is an ErrNewer if a newer version wrote it. The schema is the field of
// into for it.
func decode(data []byte, into any, schema *int) error {
	stated := schemaOf(data)
	switch {
	case stated > otherSchema && stated > Schema(): // the table is built for a greater one alone
		return newerError(stated)
	case stated < 1:
		return fmt.Errorf(`it does not begin with {"schema":%d, as ip-masq writes it`, Schema())
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("text follows the end of the document")
	}
	if *schema != stated { // the decoder takes the last of several
		return fmt.Errorf("it has the schemas %d and %d", stated, *schema)
	}
	return nil
}

// newerError returns why a document of a greater schema is neither read nor changed.
func newerError(schema int) error {
	return fmt.Errorf("%w: it has schema %d and this program knows schemas up to %d; install the newer version again",
		ErrNewer, schema, Schema())
}

// schemaOf returns the schema of a document, which every version writes at its beginning. It is 0 if
// there is none, and math.MaxInt if it is greater than that. The rest may have any form.
func schemaOf(data []byte) int {
	const space = " \t\r\n"
	rest := data
	for _, token := range []string{"{", `"schema"`, ":"} {
		var found bool
		if rest, found = bytes.CutPrefix(bytes.TrimLeft(rest, space), []byte(token)); !found {
			return 0
		}
	}
	rest = bytes.TrimLeft(rest, space)
	digits := rest[:len(rest)-len(bytes.TrimLeft(rest, "0123456789"))]
	schema, _ := strconv.Atoi(string(digits))
	return schema
}

// validate checks a document without regard to others. Readers rely on it.
func validate(s policy.Source) error {
	switch id := s.ID; {
	case id.Kind != policy.Network && id.Kind != policy.AgentFiles:
		return fmt.Errorf("source.kind: %s is not a kind of source", policy.Quote(string(id.Kind)))
	case id.Kind == policy.Network && id.Name == "":
		return errors.New("source.name: missing for a network")
	case id.Kind == policy.AgentFiles && id.Name != "":
		return errors.New("source.name: not possible for the agent files")
	case id.Kind != policy.Network && (s.PodSubnets != nil || s.ConfDir != ""):
		return errors.New("podSubnets and confDir: only possible for a network")
	}
	return s.Validate(policy.MaxCIDRLimit)
}

// State is the content of the dataDir.
type State struct {
	Sources []policy.Source // sorted
	Record  Record          // zero if there is no usable one
	Newer   []FileError     // files that a newer version wrote, which stay (ErrNewer), the record included
	Damaged []FileError     // files that cannot be used, the record included
}

// FileError is a file that cannot be read: torn, of another form, invalid, refused (ErrRefused) or newer.
type FileError struct {
	File string // its path
	Err  error  // names the path, the fault and the remedy
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

// Reading is the documents and the record as they were read together, and not decoded yet.
type Reading struct {
	files  []file
	digest string // of them, once it was asked for
	state  *State // the same
}

// file is a document or the record: its bytes, or why it is refused.
type file struct {
	name, path string
	data       []byte
	err        error
}

// Mentions reports whether a document or the record has one of these texts as a string.
func (r *Reading) Mentions(texts ...string) bool {
	return slices.ContainsFunc(r.files, func(f file) bool {
		return slices.ContainsFunc(texts, func(t string) bool { return bytes.Contains(f.data, []byte(`"`+t+`"`)) })
	})
}

// Load reads and decodes all documents and the record. Errors of single files are in the State.
func (d *Dir) Load() (State, error) {
	r, err := d.Read()
	if err != nil {
		return State{}, err
	}
	return r.State(), nil
}

// Read reads all documents and the record without the lock, each as it is before or after a concurrent
// change. A directory that does not exist is the empty Reading. The error is about directories
// (ErrRefused) or about this process (too many open files).
func (d *Dir) Read() (*Reading, error) {
	root, err := d.dataDir()
	if err != nil {
		return &Reading{}, ignoring(err, os.ErrNotExist)
	}
	defer root.close()
	files, err := root.readSources()
	if err != nil {
		return nil, err
	}
	for _, name := range []string{recordFile, podsFile} {
		f, err := root.document(name)
		if err == nil {
			files = append(files, f)
		} else if ignoring(err, os.ErrNotExist) != nil {
			return nil, err
		}
	}
	return &Reading{files: files}, nil
}

// ReadAgain reads as Read does. If nothing has changed, it returns the earlier reading, which may be decoded already.
func (d *Dir) ReadAgain(before *Reading) (*Reading, error) {
	r, err := d.Read()
	same := func(a, b file) bool {
		return a.name == b.name && a.err == nil && b.err == nil && bytes.Equal(a.data, b.data)
	}
	if err == nil && slices.EqualFunc(r.files, before.files, same) {
		return before, nil
	}
	return r, err
}

// Record reads and decodes the record of this boot, without the lock.
func (d *Dir) Record() (Record, error) {
	root, err := d.dataDir()
	if err != nil {
		return Record{}, ignoring(err, os.ErrNotExist)
	}
	defer root.close()
	f, err := root.document(recordFile)
	if err = cmp.Or(err, f.err); err != nil {
		return Record{}, ignoring(err, os.ErrNotExist)
	}
	r, err := decodeRecord(f.data)
	if r.Boot != d.Boot() {
		return Record{}, err
	}
	return r, err
}

// readSources reads the documents. It lists them again if one vanishes meanwhile, or if the directory
// changed so recently that the list may lack one, until two lists are equal: a file that is being
// replaced can be absent from a list (btrfs), and mtimes are as coarse as the kernel's tick.
func (f *folder) readSources() ([]file, error) {
	const attempts = 100
	const tick = 20 * time.Millisecond // twice the longest, that of CONFIG_HZ=100
	before := []string{""}             // equal to no list
	for range attempts {
		start := time.Now()
		sources, err := f.folder(sourcesDir, false)
		if err != nil {
			return nil, ignoring(err, os.ErrNotExist)
		}
		names, err := sources.names()
		names = slices.DeleteFunc(names, func(n string) bool {
			hash, isOne := strings.CutSuffix(n, documentSuffix)
			return !isOne || !isHash(hash)
		})
		changed, errChanged := sources.changed()
		err = errors.Join(err, errChanged)
		var files []file
		complete := err == nil && (changed.Before(start.Add(-tick)) || slices.Equal(names, before))
		for i := 0; complete && err == nil && i < len(names); i++ {
			var one file
			one, err = sources.document(names[i])
			files = append(files, one)
		}
		sources.close()
		if complete && err == nil {
			return files, nil
		}
		if ignoring(err, os.ErrNotExist) != nil {
			return nil, err
		}
		before = names
	}
	return nil, fmt.Errorf("list directory %s: it keeps changing; find the program that writes to it", shown(f.in(sourcesDir)))
}

// document reads a document or the record. The error is that there is none, or that this process or the
// kernel lacks means, which says nothing about the document. Any other is in the file.
func (f *folder) document(name string) (file, error) {
	data, err := f.read(name)
	for _, e := range []error{os.ErrNotExist, unix.EMFILE, unix.ENFILE, unix.ENOMEM} {
		if errors.Is(err, e) {
			return file{}, err
		}
	}
	return file{name, f.in(name), data, err}, nil
}

// State decodes the files, once.
func (r *Reading) State() State {
	if r.state == nil {
		var s State
		for _, f := range r.files {
			s.add(f)
		}
		slices.SortFunc(s.Sources, func(a, b policy.Source) int { return a.ID.Compare(b.ID) })
		r.state = &s
	}
	return *r.state
}

// stored decodes the document of this name, or the record, if there is one that can be read.
func (f *folder) stored(name string) (s State) {
	if now, err := f.document(name); err == nil {
		s.add(now)
	}
	return s
}

// add decodes a file.
func (s *State) add(f file) {
	err := f.err
	if err == nil {
		switch f.name {
		case recordFile:
			var r Record
			if r, err = decodeRecord(f.data); err == nil {
				s.Record = r
			}
		case podsFile: // after the record
			var pods podsDocument
			if pods, err = decodePods(f.data); err == nil && pods.Boot == s.Record.Boot {
				s.Record.ExemptPods = pods.ExemptPods
			}
		default:
			var c policy.Source
			if c, err = decodeSource(f.data, f.name); err == nil {
				s.Sources = append(s.Sources, c)
			}
		}
		if schema := schemaOf(f.data); err != nil && 0 < schema && schema < Schema() {
			err = fmt.Errorf("an older version wrote it (schema %d): %w", schema, err)
		}
	}
	switch {
	case err == nil:
	case errors.Is(err, ErrNewer):
		s.Newer = append(s.Newer, FileError{f.path, fmt.Errorf("document %s: %w", shown(f.path), err)})
	default:
		if f.err == nil {
			err = fmt.Errorf("%s %s: %w; it is moved aside when it is written again from its source", readDocument, shown(f.path), bounded(err))
		}
		s.Damaged = append(s.Damaged, FileError{f.path, err})
	}
}

// bounded returns an error of limited length for one that may repeat parts of a document.
func bounded(err error) error {
	const limit = 512
	if text := err.Error(); len(text) > limit {
		return errors.New(policy.Quote(text))
	}
	return err
}
