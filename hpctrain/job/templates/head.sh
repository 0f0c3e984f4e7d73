#!/bin/bash
# @{summary}
# @{usage}
#   @{submit}
# @{not_run}
# Written by: @{command}
