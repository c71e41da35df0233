// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"
	"fmt"
	"strings"
	"sync"
)

// teller tells somebody of errors, of each that reads alike once. It takes what
// the libraries log as well.
type teller struct {
	warn func(error) // nil: nobody wants to know

	mu   sync.Mutex
	told map[string]bool
}

// mostTold bounds what is remembered; beyond it, things are told again.
const mostTold = 100

func newTeller(warn func(error)) *teller { return &teller{warn: warn} }

func (t *teller) tell(err error) {
	if err == nil || t.warn == nil || !t.news(err.Error()) {
		return
	}
	t.warn(err)
}

func (t *teller) news(text string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.told[text] {
		return false
	}
	if t.told == nil || len(t.told) >= mostTold {
		t.told = map[string]bool{}
	}
	t.told[text] = true
	return true
}

func (t *teller) close(f func() error) { t.tell(f()) }

// Println takes what promhttp logs.
func (t *teller) Println(v ...any) {
	t.tell(errors.New(strings.TrimSpace(fmt.Sprintln(v...))))
}

// Write takes a line that net/http logs.
func (t *teller) Write(line []byte) (int, error) {
	t.tell(errors.New(strings.TrimSpace(string(line))))
	return len(line), nil
}
