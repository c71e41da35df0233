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
	"strconv"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Schema is the version of the form that documents and the record have. What
// states a greater one is left as it is.
const Schema = 2

// document is a contribution as it is stored. It has no time of writing: equal
// contributions make equal documents, and the file's mtime tells their age.
type document struct {
	Schema int `json:"schema"`
	policy.Source
}

// newerError is an ErrNewer with the schema that was met.
type newerError struct{ schema int }

func (e *newerError) Error() string {
	return fmt.Sprintf("%v: it has schema %d, and schemas up to %d are known here; install the newer version again",
		ErrNewer, e.schema, Schema)
}

func (e *newerError) Is(target error) bool { return target == ErrNewer }

// nameOf returns the name of the file in which a source's document is.
func nameOf(src policy.SourceID) string {
	return hashName("source", string(src.Kind), src.Name) + documentSuffix
}

// encodeContribution writes the document of a contribution, if reading it back
// gives the same.
func encodeContribution(c policy.Source) ([]byte, error) {
	data, err := json.Marshal(document{Schema, c})
	if err != nil {
		return nil, err
	}
	if len(data) > maxDocument {
		return nil, fmt.Errorf("it has %d bytes, and at most %d are possible", len(data), maxDocument)
	}
	again, err := decodeContribution(data, nameOf(c.ID))
	if err == nil && !reflect.DeepEqual(c, again) {
		err = errors.New("it does not read back as it was written")
	}
	return data, err
}

// decodeContribution reads the document in the named file. Its error is an
// ErrNewer where a newer version wrote it.
func decodeContribution(data []byte, name string) (policy.Source, error) {
	var d document
	if err := decode(data, &d, &d.Schema); err != nil {
		return policy.Source{}, err
	}
	err := validate(d.Source)
	if err == nil && nameOf(d.ID) != name {
		err = fmt.Errorf("the file name is not that of %s", d.ID)
	}
	if err != nil {
		return policy.Source{}, err
	}
	return d.Source, nil
}

// decode reads a document of our schema, which into has a field for.
func decode(data []byte, into any, schema *int) error {
	err := decodeStrictly(data, into)
	// What we write begins so. In all else the decoder may have taken another key
	// for the schema: it does not mind capitals, and the last of several holds.
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

// decodeStrictly reads JSON of no other fields than into has, with nothing
// behind it.
func decodeStrictly(data []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something stands behind the end of the document")
	}
	return nil
}

// schemaOf returns the first "schema" of a JSON object. What else the object
// holds may have any form, and what stands behind it need not even be JSON.
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
		return schemaNumber(value)
	}
	return 0, errors.New("it states none")
}

// schemaNumber reads a whole number; one beyond all ranges is a newer schema.
func schemaNumber(value json.Token) (int, error) {
	n, isNumber := value.(json.Number)
	if !isNumber {
		return 0, errors.New("it is not a number")
	}
	i, err := strconv.Atoi(n.String())
	if errors.Is(err, strconv.ErrRange) && i > 0 {
		return math.MaxInt, nil
	}
	return i, err
}

// validate judges what a document says by itself: whoever reads it relies on it.
func validate(c policy.Source) error {
	switch src := c.ID; {
	case src.Kind != policy.Network && src.Kind != policy.AgentFiles:
		return fmt.Errorf("source.kind: %s is not a kind of source", policy.Quote(string(src.Kind)))
	case src.Kind == policy.Network && src.Name == "":
		return errors.New("source.name: is missing, and a network has one")
	case src.Kind == policy.AgentFiles && src.Name != "":
		return errors.New("source.name: the agent files have none")
	}
	return c.Validate(policy.MaxCIDRLimit)
}
